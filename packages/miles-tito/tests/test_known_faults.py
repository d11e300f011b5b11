"""Faults that other stacks had in public, by their number in the project's list; none of them exists here."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from miles_tito import EngineError, FinishReason, Outcome, Sampling, Session, Tokenizer, load_tokenizer, to_samples
from miles_tito.engine.generation import GenerateRequest, Generation, join, one_version, run_turn
from miles_tito.records import Episode
from miles_tito.testing import Reply, ScriptedEngine
from miles_tito.tokens.family_choice import choose_family
from miles_tito.tokens.merge import Joiner
from miles_tito.tokens.messages import normalize
from miles_tito.tokens.supervised import supervised_trajectory

OpenChat = Callable[..., Any]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def samples_of(chat: Any) -> list[dict[str, Any]]:
    answer = await chat.http.post(f"{chat.server}/sessions/s/samples", json={"reward": 1.0}, headers=chat.auth)
    return answer.json()["samples"]


async def test_t01_a_turn_resumed_after_an_abort_is_masked_over_its_whole_length(
    tokenizer: Tokenizer, open_chat: OpenChat
):
    ids = tokenizer.encode("abcdefg").tolist()
    aborted = Reply(ids=ids[:3], finish_reason=FinishReason.ABORT)
    engine = ScriptedEngine([aborted, Reply(ids=[*ids[3:], tokenizer.eos_ids[0]])], tokenizer=tokenizer)
    async with open_chat(engine) as chat:
        await chat.say([user("q")])
        [sample] = await samples_of(chat)
    prompt = len(engine.requests[0].input_ids)
    assert sample["loss_mask"] == [False] * prompt + [True] * (len(ids) + 1)
    assert sample["tokens"][prompt:] == [*ids, tokenizer.eos_ids[0]]
    assert len(sample["logprobs"]) == len(sample["tokens"])


async def test_t02_a_continuation_asks_for_the_budget_that_is_left_within_the_context():
    first = Reply(ids=[1, 2, 3, 4], finish_reason=FinishReason.ABORT)
    engine = ScriptedEngine([first, [5, 6]])
    request = GenerateRequest(
        rid="r", session_id="s", input_ids=np.arange(4, dtype=np.int32), sampling=Sampling(), max_new_tokens=6
    )
    whole = join([piece async for piece in run_turn(engine, request, stream=False)])
    assert [asked.max_new_tokens for asked in engine.requests] == [6, 2]
    assert [len(asked.input_ids) + asked.max_new_tokens for asked in engine.requests] == [10, 10]
    assert whole.output_ids.tolist() == [1, 2, 3, 4, 5, 6]


async def test_t03_a_turn_that_another_end_token_ended_is_no_truncated_one(tokenizer: Tokenizer, open_chat: OpenChat):
    other_end = tokenizer.token_id("<|endoftext|>")
    engine = ScriptedEngine([Reply(ids=[*tokenizer.encode("fine"), other_end])], tokenizer=tokenizer)
    async with open_chat(engine) as chat:
        answer = await chat.say([user("q")])
        [sample] = await samples_of(chat)
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert sample["metadata"]["finish_reason"] == "stop"


def test_t04_only_the_assistants_spans_of_a_demonstration_are_trained(tokenizer: Tokenizer):
    joiner = Joiner(tokenizer, choose_family("auto", tokenizer))
    talk = [user("a"), {"role": "assistant", "content": "one"}, user("b"), {"role": "assistant", "content": "two"}]
    demonstration = supervised_trajectory(joiner, talk, id="d")
    trained = demonstration.tokens[demonstration.loss_mask]
    assert tokenizer.decode(trained, keep=tokenizer.control_ids) == "one<|im_end|>two<|im_end|>"


def test_t05_the_end_of_each_turn_is_learned(tokenizer: Tokenizer):
    joiner = Joiner(tokenizer, choose_family("auto", tokenizer))
    talk = [user("a"), {"role": "assistant", "content": "one"}, user("b"), {"role": "assistant", "content": "two"}]
    demonstration = supervised_trajectory(joiner, talk, id="d")
    ends = np.flatnonzero(demonstration.tokens == joiner.close_id)
    assert demonstration.loss_mask[ends].tolist() == [False, True, False, True]


STREAMS = ["\U0001f469\u200d\U0001f680", "漢字", "  \n\n\t ", "e\u0301", "\ufeff", "a" * 70, "\r\n", "<|im_end|>"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40)
@given(data=st.data())
def test_t06_what_was_sampled_is_trained_even_where_no_text_gives_those_ids(tokenizer: Tokenizer, data: st.DataObject):
    plain = [i for i in range(tokenizer.vocab_size) if i not in tokenizer.control_ids]
    noise = data.draw(st.lists(st.sampled_from(plain), max_size=12))
    text = data.draw(st.lists(st.sampled_from(STREAMS), max_size=3))
    ids = [*noise, *tokenizer.encode_guarded(tokenizer.guard("".join(text))).tolist(), tokenizer.eos_ids[0]]
    session = Session("s", Joiner(tokenizer, choose_family("auto", tokenizer)), max_context=10_000)
    messages = [user("q")]
    for _ in range(2):
        plan = session.plan(normalize(messages))
        turn = session.begin(plan, session.encode(plan), rid="r")
        turn.reader.feed(np.asarray(ids, np.int32))
        turn.reader.finish()
        messages += [dict(session.commit(turn, _whole(ids)).message), user("more")]
    [trajectory] = session.trajectories()
    assert trajectory.tokens[trajectory.loss_mask].tolist() == ids * 2


def _whole(ids: list[int]) -> Generation:
    return Generation(
        output_ids=np.asarray(ids, np.int32),
        logprobs=np.full(len(ids), -0.5, np.float32),
        versions=one_version(len(ids), 0),
        finish_reason=FinishReason.STOP,
    )


def test_t07_a_template_that_writes_the_first_token_does_not_get_it_twice(
    tmp_path: Path, write_tokenizer: Any, chatml: str
):
    folder = write_tokenizer(tmp_path, template="{{ bos_token }}" + chatml, bos_token="<|endoftext|>")
    path = folder / "tokenizer.json"
    backend = json.loads(path.read_text())
    bos = next(token["id"] for token in backend["added_tokens"] if token["content"] == "<|endoftext|>")
    begin = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
    backend["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [begin, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [begin, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [bos], "tokens": ["<|endoftext|>"]}},
    }
    path.write_text(json.dumps(backend))
    tokenizer = load_tokenizer(folder)
    session = Session("s", Joiner(tokenizer, choose_family("tiny", tokenizer)), max_context=1000)
    ids = session.encode(session.plan([user("q")]))
    assert ids[0] == bos
    assert (ids == bos).sum() == 1


async def test_t08_a_turn_sent_again_after_a_failure_has_log_probs_of_its_own_tokens_only(
    tokenizer: Tokenizer, open_chat: OpenChat
):
    failed = Reply(ids=[5, 6, 7], error=EngineError("gone", status=500))
    engine = ScriptedEngine([failed, "fine"], tokenizer=tokenizer)
    async with open_chat(engine) as chat:
        assert (await chat.post([user("q")])).status_code == 502
        await chat.say([user("q")])
        [sample] = await samples_of(chat)
    assert sum(sample["loss_mask"]) == len(tokenizer.encode("fine")) + 1
    assert len(sample["tokens"]) == len(sample["loss_mask"]) == len(sample["logprobs"])


def test_t08_an_episode_that_failed_makes_no_sample_at_all():
    episode = Episode(id="e", prompt_id="p", group_id="g", outcome=Outcome.INFRA_ABORT, error="the sandbox is gone")
    with pytest.raises(ValueError, match="Episode e ended as infra_abort"):
        to_samples(episode, 0.0)
