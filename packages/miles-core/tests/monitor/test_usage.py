"""How busy engines and trainer were, by a clock that the test turns."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import numpy as np
import pytest
from miles_core.monitor.usage import BusyMeter, Counters, MeteredEngine, RunUsage
from miles_tito.engine.generation import GenerateRequest, Generation
from miles_tito.records import Sampling
from miles_tito.testing import Reply, ScriptedEngine


class FakeClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Trace:
    """A monitor that keeps its events."""

    def __init__(self) -> None:
        self.events: list[tuple[str, float, float, str]] = []

    def event(self, name: str, start: float, end: float, lane: str) -> None:
        self.events.append((name, start, end, lane))

    def log(self, step: int, metrics: object) -> None:
        raise AssertionError("usage returns metrics, it does not log them")

    def log_late(self, step: int, metrics: object) -> None:
        raise AssertionError("nothing comes late")

    def finish(self, summary: object) -> None:
        raise AssertionError("usage does not end a run")


def test_overlapping_requests_count_once() -> None:
    clock = FakeClock()
    meter = BusyMeter(clock=clock)
    with meter:
        clock.now += 2
        with meter:
            clock.now += 3
        clock.now += 1
    clock.now += 10
    assert meter.read() == (6.0, ((100.0, 106.0),))


def test_short_pauses_are_drawn_together_but_not_counted_as_busy() -> None:
    clock = FakeClock()
    meter = BusyMeter(clock=clock)
    for pause in (0.01, 5.0, 0.0):
        with meter:
            clock.now += 1
        clock.now += pause
    busy, spans = meter.read()
    assert busy == pytest.approx(3.0)
    assert spans == (pytest.approx((100.0, 102.01)), pytest.approx((107.01, 108.01)))


def test_a_reading_in_the_middle_of_a_request_counts_no_second_twice() -> None:
    clock = FakeClock()
    meter = BusyMeter(clock=clock)
    with meter:
        clock.now += 4
        first, spans = meter.read()
        clock.now += 2
    second, later = meter.read()
    assert (first, spans) == (4.0, ((100.0, 104.0),))
    assert (second, later) == (6.0, ((104.0, 106.0),))
    assert meter.read() == (6.0, ()), "spans are handed out once"


def test_a_request_that_fails_is_not_busy_for_ever() -> None:
    clock = FakeClock()
    meter = BusyMeter(clock=clock)

    def fail() -> None:
        with meter:
            clock.now += 1
            raise ConnectionError

    with pytest.raises(ConnectionError):
        fail()
    clock.now += 50
    assert meter.read()[0] == 1.0


def request(rid: str) -> GenerateRequest:
    return GenerateRequest(
        rid=rid,
        session_id="s",
        input_ids=np.arange(3, dtype=np.int32),
        sampling=Sampling(),
        max_new_tokens=8,
    )


async def test_a_metered_engine_counts_the_tokens_of_calls_and_streams() -> None:
    engine = MeteredEngine(ScriptedEngine([Reply(ids=[1, 2, 3]), Reply(ids=[4, 5]), Reply(ids=[6, 7, 8, 9])]))
    whole = await engine.generate(request("a"))
    assert whole.output_ids.tolist() == [1, 2, 3]
    assert engine.counters().sampled_tokens == 3
    pieces = [piece async for piece in engine.stream(request("b"))]
    assert [token for piece in pieces for token in piece.output_ids.tolist()] == [4, 5]
    assert engine.counters().sampled_tokens == 5


async def test_a_stream_that_the_client_leaves_is_closed_in_the_engine() -> None:
    scripted = ScriptedEngine([Reply(ids=[6, 7, 8, 9])])
    engine = MeteredEngine(scripted)
    stream: AsyncGenerator[Generation, None] = engine.stream(request("c"))
    await anext(stream)
    await stream.aclose()
    assert scripted.aborted == ["c"]
    assert engine.counters().sampled_tokens == 1
    assert engine.counters().spans == (), "nothing runs any more"


def counters(busy_s: float, tokens: int, *spans: tuple[float, float]) -> Counters:
    return Counters(busy_s=busy_s, sampled_tokens=tokens, spans=spans)


def test_a_step_is_measured_from_the_last_one_and_the_loop_from_its_start() -> None:
    clock, trace = FakeClock(), Trace()
    usage = RunUsage([counters(7.0, 100), counters(5.0, 10)], monitor=trace, clock=clock)  # before the loop: evaluation
    calm = {"engine/resent": 0.0, "engine/swallowed": 0.0}
    clock.now += 10
    one = usage.step([counters(12.0, 300, (1.0, 6.0)), counters(9.0, 30, (2.0, 3.0))], train_seconds=4.0, episodes=32)
    assert one == {**calm, "engine/tokens_per_s": 22.0, "engine/utilisation": 0.5, "trainer/utilisation": 0.4}
    assert trace.events == [("generate", 1.0, 6.0, "engine"), ("generate", 2.0, 3.0, "engine 1")]
    clock.now += 30
    two = usage.step([counters(27.0, 300), counters(9.0, 30)], train_seconds=6.0, episodes=32)
    assert two == {**calm, "engine/tokens_per_s": 0.0, "engine/utilisation": 0.5, "trainer/utilisation": 0.2}
    clock.now += 1000  # whatever comes behind the last step
    assert usage.seconds == 40.0
    assert usage.totals() == {"samples_per_s": 64 / 40, "engine_utilisation": 0.5, "trainer_utilisation": 0.25}


def test_a_loop_without_a_step_has_no_speed() -> None:
    usage = RunUsage([counters(7.0, 100)], monitor=Trace(), clock=FakeClock())
    assert usage.totals() == {"samples_per_s": 0.0, "engine_utilisation": 0.0, "trainer_utilisation": 0.0}


def test_a_server_that_took_the_place_of_another_counts_on() -> None:
    before = Counters(busy_s=5.0, sampled_tokens=100, spans=((0.0, 5.0),), resent=2, swallowed=1)
    now = Counters(busy_s=1.0, sampled_tokens=10, spans=((9.0, 10.0),), resent=1)
    assert now.after(before) == Counters(busy_s=6.0, sampled_tokens=110, spans=((9.0, 10.0),), resent=3, swallowed=1)


def test_requests_sent_again_and_swallowed_ones_are_told() -> None:
    usage = RunUsage([Counters()], monitor=Trace(), clock=FakeClock())
    metrics = usage.step([Counters(resent=2), Counters(resent=1, swallowed=1)], train_seconds=0.0, episodes=0)
    assert (metrics["engine/resent"], metrics["engine/swallowed"]) == (3.0, 1.0)
