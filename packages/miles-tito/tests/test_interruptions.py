"""However a turn is cut up, its ids, log-probs, masks and versions stay together, and the budget is spent once."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from itertools import pairwise
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from miles_tito import EngineError, Sample, SampleError, Session, Tokenizer, VersionSpan, to_samples
from miles_tito.adapters.layouts import to_slime
from miles_tito.engine.generation import GenerateRequest, Generation, join, one_version, run_turn
from miles_tito.records import Episode, FinishReason, Outcome, Sampling
from miles_tito.tokens.family_choice import choose_family
from miles_tito.tokens.merge import Joiner

FIXTURES = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


class CutEngine:
    """Samples `reply` id by id; each call ends after as many ids as `cuts` says, by an abort or a broken connection."""

    def __init__(self, reply: list[int], cuts: list[tuple[int, bool]], *, finish: FinishReason) -> None:
        self.reply = reply
        self.cuts = list(cuts)
        self.finish = finish
        self.calls: list[GenerateRequest] = []
        self._prompt = 0

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[Generation, None]:
        self.calls.append(request)
        self._prompt = self._prompt or len(request.input_ids)
        done = len(request.input_ids) - self._prompt
        assert request.input_ids[self._prompt :].tolist() == self.reply[:done], "the ids so far, and nothing else"
        cut, breaks = self.cuts.pop(0) if self.cuts else (len(self.reply), False)
        end = min(done + cut, len(self.reply), done + request.max_new_tokens)
        for position in range(done, end):
            last = position == len(self.reply) - 1
            spent = position - done == request.max_new_tokens - 1
            finish = self.finish if last else FinishReason.LENGTH if spent else None
            yield self._piece([self.reply[position]], [position], finish)
            if finish is not None:
                return
        if breaks:
            raise EngineError("the connection broke", retryable=True)
        yield self._piece([], [], FinishReason.ABORT)

    async def generate(self, request: GenerateRequest) -> Generation:
        raise AssertionError("only streams are cut")

    async def abort(self, rid: str) -> None: ...

    async def aclose(self) -> None: ...

    def _piece(self, ids: list[int], positions: list[int], finish: FinishReason | None) -> Generation:
        return Generation(
            output_ids=np.asarray(ids, np.int32),
            logprobs=np.asarray([-(1.0 + position) for position in positions], np.float32),
            versions=one_version(len(ids), len(self.calls)),
            finish_reason=finish,
        )


@FIXTURES
@given(
    length=st.integers(1, 12),
    budget=st.integers(1, 14),
    room=st.integers(1, 14),
    cuts=st.lists(st.tuples(st.integers(1, 5), st.booleans()), max_size=5),
)
async def test_a_cut_turn_is_the_uncut_one(
    tokenizer: Tokenizer, length: int, budget: int, room: int, cuts: list[tuple[int, bool]]
):
    """Each call asks for what is left of the budget and of the context, and the parts join to one turn."""
    joiner = Joiner(tokenizer, choose_family("tiny", tokenizer))
    question: list[dict[str, Any]] = [{"role": "user", "content": "q"}]
    prompt = len(Session("s", joiner, max_context=99).encode(Session("s", joiner, max_context=99).plan(question)))
    session = Session("s", joiner, max_context=prompt + room, sampling=Sampling(max_tokens=budget))
    plan = session.plan(question)
    turn = session.begin(plan, session.encode(plan), rid="r")
    reply = [20 + n for n in range(length)]
    engine = CutEngine(reply, cuts, finish=FinishReason.STOP)
    pieces = [piece async for piece in run_turn(engine, turn.request, stream=True)]
    whole = join(pieces)
    turn.reader.feed(whole.output_ids)
    turn.reader.finish()
    session.commit(turn, whole)

    allowed = min(length, budget, room)
    for call in engine.calls:
        done = len(call.input_ids) - prompt
        assert call.max_new_tokens == min(budget, room) - done
        assert len(call.input_ids) + call.max_new_tokens <= session.max_context
        assert call.rid == "r"
    (trajectory,) = session.trajectories()
    assert trajectory.tokens[prompt:].tolist() == reply[:allowed]
    assert trajectory.loss_mask.tolist() == [False] * prompt + [True] * allowed
    assert trajectory.logprobs[prompt:].tolist() == [-(1.0 + n) for n in range(allowed)]
    spans = trajectory.versions
    assert (spans[0].start, spans[-1].end) == (prompt, prompt + allowed)
    assert all(a.end == b.start and a.version < b.version for a, b in pairwise(spans))


@pytest.mark.parametrize(
    ("last", "finish", "status"),
    [
        ("<|endoftext|>", FinishReason.STOP, "completed"),
        ("<|im_end|>", FinishReason.STOP, "completed"),
        ("<|im_end|>", FinishReason.LENGTH, "truncated"),
    ],
)
async def test_whether_a_turn_is_truncated_is_what_the_engine_says_not_its_last_id(
    last: str, finish: FinishReason, status: str, tokenizer: Tokenizer
):
    joiner = Joiner(tokenizer, choose_family("tiny", tokenizer))
    session = Session("s", joiner, max_context=999)
    plan = session.plan([{"role": "user", "content": "q"}])
    turn = session.begin(plan, session.encode(plan), rid="r")
    engine = CutEngine([20, 21, tokenizer.token_id(last) or 0], [], finish=finish)
    whole = join([piece async for piece in run_turn(engine, turn.request, stream=True)])
    turn.reader.feed(whole.output_ids)
    turn.reader.finish()
    assert session.commit(turn, whole).finish_reason is finish
    episode = Episode(
        id="e", prompt_id="p", group_id="g", outcome=Outcome.GRADED, reward=0.0, trajectories=session.trajectories()
    )
    assert to_slime(to_samples(episode, 1.0))[0]["status"] == status


@pytest.mark.parametrize("column", ["logprobs", "loss_mask"])
def test_columns_of_another_attempt_are_refused_where_the_sample_is_made(column: str):
    """As when a retried sample keeps the log-probs of its first attempt."""
    fields: dict[str, Any] = {
        "tokens": np.arange(9, dtype=np.int32),
        "loss_mask": np.ones(9, bool),
        "logprobs": np.full(9, -1.0, np.float32),
    }
    fields[column] = fields[column][:6]
    with pytest.raises(SampleError, match=rf"`{column}` has 6 entries but `tokens` has 9"):
        Sample(
            id="e",
            episode_id="e",
            group_id="g",
            prompt_id="p",
            advantage=0.0,
            loss_denominator=9,
            versions=(VersionSpan(start=0, end=9, version=1),),
            **fields,
        )
