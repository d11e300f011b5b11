"""A request that an engine accepted and lost is found within a few countings, and goes to an engine again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import numpy as np
import pytest
from miles_tito import FinishReason, Sampling
from miles_tito.engine.generation import GenerateRequest, Generation, join, one_version, run_turn
from miles_tito.engine.lost_requests import WatchedEngine
from miles_tito.errors import RequestSwallowed

QUICK = {"interval_s": 0.005, "patience_s": 0.02, "answer_s": 0.05}


def request(rid: str = "r") -> GenerateRequest:
    return GenerateRequest(rid=rid, session_id="s", input_ids=np.arange(3), sampling=Sampling(), max_new_tokens=4)


def piece(*ids: int, finish: FinishReason | None = None) -> Generation:
    return Generation(
        output_ids=np.array(ids, np.int32),
        logprobs=np.full(len(ids), -1.0, np.float32),
        versions=one_version(len(ids), 1),
        finish_reason=finish,
    )


class Holding:
    """Answers when a test says so, or when it is aborted; what it swallows it forgets."""

    def __init__(self, *, swallow: int = 0, paused: bool = False) -> None:
        self.asked: list[str] = []
        self.aborted: list[str] = []
        self.paused = paused
        self.counted = asyncio.Event()
        self._to_swallow = swallow
        self._held: dict[str, asyncio.Future[Generation]] = {}

    async def generate(self, request: GenerateRequest) -> Generation:
        self.asked.append(request.rid)
        answer: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        if self._to_swallow:
            self._to_swallow -= 1
        else:
            self._held[request.rid] = answer
        try:
            return await answer
        finally:
            self._held.pop(request.rid, None)

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[Generation, None]:
        yield piece(9)
        yield await self.generate(request)

    def finish(self, rid: str, *ids: int) -> None:
        self._held.pop(rid).set_result(piece(*ids, finish=FinishReason.STOP))

    async def abort(self, rid: str) -> None:
        self.aborted.append(rid)
        if rid in self._held:
            self._held.pop(rid).set_result(piece(7, finish=FinishReason.ABORT))

    async def num_known(self) -> int | None:
        self.counted.set()
        self.counted = asyncio.Event()
        return None if self.paused else len(self._held)

    async def counts(self, times: int) -> None:
        """Wait until it was counted so often."""
        for _ in range(times):
            await self.counted.wait()

    async def aclose(self) -> None: ...


async def whole(engine: Any, *, stream: bool = False) -> Generation:
    return join([p async for p in run_turn(engine, request(), stream=stream)])


@pytest.mark.timeout(20)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_swallowed_request_is_found_named_and_sent_again(stream: bool, caplog: pytest.LogCaptureFixture):
    inner = Holding(swallow=1)
    engine = WatchedEngine(inner, **QUICK)
    turn = asyncio.create_task(whole(engine, stream=stream))
    while len(inner.asked) < 2:
        await inner.counts(1)
    inner.finish("r", 5, 6)
    made = await turn
    assert made.output_ids.tolist() == ([9, 9, 5, 6] if stream else [5, 6])
    assert inner.asked == ["r", "r"]
    assert engine.counts().swallowed == 1
    assert "Request r (3 tokens in) was accepted 0 s ago and no engine knows of it" in caplog.text
    await engine.aclose()


@pytest.mark.timeout(20)
async def test_a_request_that_is_swallowed_twice_fails_with_the_reason():
    engine = WatchedEngine(Holding(swallow=2), **QUICK)
    with pytest.raises(RequestSwallowed, match="no engine knows of it"):
        await whole(engine)
    await engine.aclose()


@pytest.mark.timeout(20)
async def test_a_request_that_the_engine_has_answers_the_probe_and_goes_on_behind_its_tokens():
    inner = Holding(swallow=1)
    engine = WatchedEngine(inner, **QUICK)
    lost = asyncio.create_task(engine.generate(request("lost")))
    alive = asyncio.create_task(whole(engine))
    with pytest.raises(RequestSwallowed):
        await lost
    while inner.asked.count("r") < 2:
        await inner.counts(1)
    inner.finish("r", 5)
    assert (await alive).output_ids.tolist() == [7, 5]
    assert engine.counts().swallowed == 1
    await engine.aclose()


@pytest.mark.timeout(20)
async def test_requests_that_wait_for_new_weights_are_not_suspected():
    inner = Holding(swallow=1, paused=True)
    engine = WatchedEngine(inner, **QUICK)
    call = asyncio.create_task(engine.generate(request()))
    await inner.counts(10)
    assert inner.aborted == []
    call.cancel()
    await asyncio.wait([call])
    await engine.aclose()


@pytest.mark.timeout(20)
async def test_long_requests_that_are_all_accounted_for_are_left_alone():
    inner = Holding()
    engine = WatchedEngine(inner, **QUICK)
    calls = [asyncio.create_task(engine.generate(request(f"r{i}"))) for i in range(5)]
    await inner.counts(12)
    assert inner.aborted == []
    for i in range(5):
        inner.finish(f"r{i}", i)
    assert [(await call).output_ids.tolist() for call in calls] == [[i] for i in range(5)]
    assert engine.num_waiting == 0
    await engine.aclose()


@pytest.mark.timeout(20)
async def test_a_missing_request_that_other_users_hide_is_probed_after_a_long_silence():
    class Busy(Holding):
        async def num_known(self) -> int | None:
            await super().num_known()
            return 100

    engine = WatchedEngine(Busy(swallow=1), **QUICK, probe_anyway_s=0.1)
    with pytest.raises(RequestSwallowed):
        await engine.generate(request())
    await engine.aclose()
