"""A turn goes on through aborts and broken connections, with the budget that is left and its versions kept."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from miles_tito import EngineError, FinishReason, Sampling, Tokenizer, VersionSpan
from miles_tito.engine.generation import GenerateRequest, Generation, join, one_version, run_turn
from miles_tito.errors import RequestSwallowed
from miles_tito.testing import Reply, ScriptedEngine


def request(budget: int = 6, **changes: Any) -> GenerateRequest:
    fields: dict[str, Any] = {
        "rid": "r",
        "session_id": "s",
        "input_ids": np.arange(10, dtype=np.int32),
        "sampling": Sampling(),
        "max_new_tokens": budget,
    }
    return GenerateRequest(**{**fields, **changes})


async def whole(engine: Any, asked: GenerateRequest, *, stream: bool = False) -> Generation:
    return join([piece async for piece in run_turn(engine, asked, stream=stream)])


@pytest.mark.parametrize("stream", [False, True])
async def test_an_aborted_call_goes_on_with_the_budget_that_is_left(stream: bool):
    engine = ScriptedEngine(
        [Reply(ids=[1, 2, 3, 4], finish_reason=FinishReason.ABORT), Reply(ids=[5, 6, 7, 8, 9, 10, 11])], version=3
    )
    made = await whole(engine, request(budget=6), stream=stream)
    assert made.output_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert made.finish_reason is FinishReason.LENGTH
    first, second = engine.requests
    assert (first.max_new_tokens, second.max_new_tokens) == (6, 2)
    assert second.input_ids.tolist() == [*range(10), 1, 2, 3, 4]
    assert (first.rid, second.rid) == ("r", "r")


async def test_each_part_keeps_the_version_it_was_sampled_under():
    async def update(asked: GenerateRequest) -> Reply:
        if len(engine.requests) == 1:
            return Reply(ids=[1, 2, 3], finish_reason=FinishReason.ABORT)
        engine.version = 8
        return Reply(ids=[4, 5])

    engine = ScriptedEngine(update, version=7)
    made = await whole(engine, request())
    assert made.versions == (VersionSpan(start=0, end=3, version=7), VersionSpan(start=3, end=5, version=8))


async def test_a_weight_update_that_aborts_everything_is_invisible_to_the_turn():
    async def pause_at_two(asked: GenerateRequest, n: int) -> None:
        if n == 2 and engine.version == 0:
            engine.pause()
            engine.version = 1
            engine.resume()

    engine = ScriptedEngine(lambda asked: Reply(ids=[5] * asked.max_new_tokens), before_token=pause_at_two)
    made = await whole(engine, request(budget=6), stream=True)
    assert made.output_ids.tolist() == [5] * 6
    assert [(s.start, s.end, s.version) for s in made.versions] == [(0, 2, 0), (2, 6, 1)]


async def test_an_abort_before_the_first_token_is_sent_again():
    engine = ScriptedEngine([Reply(ids=[], finish_reason=FinishReason.ABORT), Reply(ids=[1, 2])])
    assert (await whole(engine, request())).output_ids.tolist() == [1, 2]


async def test_an_abort_at_the_end_of_the_budget_ends_the_turn_by_length():
    engine = ScriptedEngine([Reply(ids=[1, 2], finish_reason=FinishReason.ABORT)])
    made = await whole(engine, request(budget=2))
    assert (made.output_ids.tolist(), made.finish_reason) == ([1, 2], FinishReason.LENGTH)


BROKEN = EngineError("connection lost", retryable=True)


async def test_a_broken_stream_goes_on_behind_the_tokens_it_brought():
    engine = ScriptedEngine([Reply(ids=[1, 2], error=BROKEN), Reply(ids=[3, 4, 5])])
    made = await whole(engine, request(), stream=True)
    assert made.output_ids.tolist() == [1, 2, 3, 4, 5]
    assert engine.requests[1].max_new_tokens == 4


async def test_a_connection_that_stays_broken_fails_after_a_bounded_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("miles_tito.engine.generation.RETRY_FOR_S", 0.2)
    engine = ScriptedEngine(lambda asked: Reply(ids=[], error=BROKEN))
    with pytest.raises(EngineError, match="connection lost"):
        await whole(engine, request())
    assert 2 <= len(engine.requests) <= 5
    assert {asked.rid for asked in engine.requests} == {"r"}


async def test_time_in_which_a_call_was_held_back_does_not_count_as_failing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("miles_tito.engine.generation.RETRY_FOR_S", 0.3)
    monkeypatch.setattr("miles_tito.engine.generation.MAX_COUNTED_S", 0.01)

    async def script(asked: GenerateRequest) -> Reply:
        if len(engine.requests) == 2:
            await asyncio.sleep(0.5)  # no engine serves
        return Reply(ids=[], error=BROKEN) if len(engine.requests) < 4 else Reply(ids=[1, 2])

    engine = ScriptedEngine(script)
    assert (await whole(engine, request())).output_ids.tolist() == [1, 2]


async def test_an_engine_that_returns_after_many_failures_goes_on_with_the_turn(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("miles_tito.engine.generation.MAX_WAIT_S", 0.001)
    broken = [Reply(ids=[], error=BROKEN)] * 30
    engine = ScriptedEngine([Reply(ids=[1, 2], error=BROKEN), *broken, Reply(ids=[3, 4])])
    made = await whole(engine, request(), stream=True)
    assert made.output_ids.tolist() == [1, 2, 3, 4]


async def test_a_swallowed_call_is_sent_again_once_and_then_fails():
    lost = RequestSwallowed("no engine knows of it", retryable=True)
    engine = ScriptedEngine([Reply(ids=[], error=lost), Reply(ids=[1, 2])])
    assert (await whole(engine, request())).output_ids.tolist() == [1, 2]
    engine = ScriptedEngine(lambda asked: Reply(ids=[], error=lost))
    with pytest.raises(RequestSwallowed, match="no engine knows of it"):
        await whole(engine, request())
    assert len(engine.requests) == 2


async def test_a_refusal_is_not_tried_again():
    engine = ScriptedEngine(lambda asked: Reply(ids=[], error=EngineError("too long", status=400)))
    with pytest.raises(EngineError, match="too long"):
        await whole(engine, request())
    assert len(engine.requests) == 1


async def test_endless_aborts_without_a_token_end_with_an_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("miles_tito.engine.generation.MAX_EMPTY_ABORTS", 2)
    engine = ScriptedEngine(lambda asked: Reply(ids=[], finish_reason=FinishReason.ABORT))
    with pytest.raises(EngineError, match="aborted 3 times in a row without a token"):
        await whole(engine, request())


async def test_log_probs_are_taken_at_the_sampling_temperature(tokenizer: Tokenizer):
    rng = np.random.default_rng(0)
    table = rng.normal(size=(tokenizer.vocab_size, tokenizer.vocab_size)).astype(np.float32) * 3
    engine = ScriptedEngine([[5, 9, 2]], logits=lambda ids: table[ids[-1]])
    asked = request(sampling=Sampling(temperature=0.6))
    made = await whole(engine, asked)
    before = [int(asked.input_ids[-1]), 5, 9]
    scaled = table[before].astype(np.float64) / 0.6
    expected = scaled[range(3), [5, 9, 2]] - np.log(np.exp(scaled).sum(-1))
    ratio = np.exp(made.logprobs - expected)
    assert np.abs(ratio - 1).max() < 1e-6


class OneShot:
    """An engine that yields its pieces and records whether the stream was closed."""

    closed = False

    async def stream(self, asked: GenerateRequest) -> AsyncGenerator[Generation, None]:
        try:
            for token in range(100):
                yield Generation(
                    output_ids=np.array([token]), logprobs=np.array([-1.0]), versions=one_version(1), cached_tokens=3
                )
        finally:
            self.closed = True


async def test_leaving_a_turn_half_way_closes_the_engines_stream():
    engine: Any = OneShot()
    turn = run_turn(engine, request(budget=50), stream=True)
    async for _ in turn:
        break
    await turn.aclose()
    assert engine.closed


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"logprobs": [-1.0]}, "2 tokens but 1 log-probs"),
        ({"logprobs": [-1.0, float("nan")]}, "not finite for 1 of 2 tokens, the first at 1"),
        ({"versions": (VersionSpan(start=0, end=1, version=1),)}, "end at token 1 of 2"),
        ({"versions": (VersionSpan(start=1, end=2, version=1),)}, r"leave tokens \[0, 1\) without one"),
    ],
)
def test_an_answer_that_contradicts_itself_is_an_engine_error(changes: dict[str, Any], why: str):
    fields: dict[str, Any] = {"output_ids": [1, 2], "logprobs": [-1.0, -2.0], "versions": one_version(2, 1)}
    with pytest.raises(EngineError, match=why):
        Generation(**{**fields, **changes})


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2)), max_size=8))
def test_joined_pieces_cover_all_tokens_with_merged_versions(parts: list[tuple[int, int]]):
    pieces = [
        Generation(output_ids=[n] * size, logprobs=[-1.0] * size, versions=one_version(size, version))
        for n, (size, version) in enumerate(parts)
    ]
    made = join(pieces)
    expected = [version for size, version in parts for _ in range(size)]
    assert [span.version for span in made.versions for _ in range(span.end - span.start)] == expected
    assert all(a.version != b.version for a, b in zip(made.versions, made.versions[1:], strict=False))
