"""The supervisor routes around dead engines, brings them back with the run's weights, and never waits for ever."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from miles_rollout.engines import EngineConfigError, EngineState, FleetLostError, HealthConfig
from scripted_fleet import START_S, ScriptedFleet
from scripted_rollout import now, run_virtual

FIRST, SECOND = "http://engine-0", "http://engine-1"
REVIVED = ["dead", "restarting", "syncing", "healthy"]


def supervise(
    story: Callable[[ScriptedFleet], Awaitable[Any]],
    *,
    engines: int = 2,
    config: HealthConfig | None = None,
    version: int = 3,
) -> ScriptedFleet:
    """Play `story` while the fleet is supervised, on the virtual clock; returns the fleet."""

    async def main() -> ScriptedFleet:
        fleet = ScriptedFleet(engines, config, version=version)
        running = asyncio.create_task(fleet.supervisor.run())
        telling = asyncio.ensure_future(story(fleet))
        await asyncio.wait([running, telling], return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            telling.cancel()
            running.result()
        await telling
        running.cancel()
        await asyncio.wait([running])
        return fleet

    return run_virtual(main())


def test_an_engine_whose_process_ends_leaves_routing_at_once_and_returns_with_the_runs_weights():
    async def story(fleet: ScriptedFleet) -> None:
        await asyncio.sleep(5)
        fleet.servers[0].die()
        await asyncio.sleep(0.2)
        assert fleet.routed == (SECOND,)
        assert fleet.supervisor.serving == (SECOND,)
        await asyncio.sleep(START_S + 5)
        assert fleet.routed == (FIRST, SECOND)

    fleet = supervise(story)
    assert fleet.path(FIRST) == ["healthy", *REVIVED]
    assert fleet.path(SECOND) == ["healthy"]
    assert fleet.servers[0].version == 3
    assert fleet.events[2].reason == "exited with status 137"
    assert fleet.pauses == []


def test_an_engine_that_stops_answering_is_suspect_first_and_then_dead():
    async def story(fleet: ScriptedFleet) -> None:
        fleet.servers[0].answers = False
        await asyncio.sleep(25)
        assert fleet.supervisor.states[FIRST] is EngineState.SUSPECT
        assert FIRST in fleet.routed
        await asyncio.sleep(50)
        assert fleet.supervisor.states[FIRST] is not EngineState.SUSPECT
        await asyncio.sleep(60)

    fleet = supervise(story, config=HealthConfig(dead_after_s=60))
    assert fleet.path(FIRST) == ["healthy", "suspect", *REVIVED]
    assert "it does not answer, for" in next(event.reason for event in fleet.events if event.new == "dead")


def test_an_engine_that_answers_but_generates_nothing_is_dead_in_the_end():
    async def story(fleet: ScriptedFleet) -> None:
        fleet.servers[0].generates = False
        await asyncio.sleep(200)

    fleet = supervise(story, config=HealthConfig(dead_after_s=100))
    assert fleet.path(FIRST) == ["healthy", "suspect", *REVIVED]
    assert "no token gets through" in next(event.reason for event in fleet.events if event.new == "dead")


def test_a_suspect_engine_that_answers_again_is_healthy_without_a_restart():
    async def story(fleet: ScriptedFleet) -> None:
        fleet.servers[0].answers = False
        await asyncio.sleep(25)
        fleet.servers[0].answers = True
        await asyncio.sleep(60)

    fleet = supervise(story)
    assert fleet.path(FIRST) == ["healthy", "suspect", "healthy"]
    assert fleet.servers[0].starts == 0


def test_an_engine_that_a_push_keeps_paused_for_long_is_not_sick():
    async def story(fleet: ScriptedFleet) -> None:
        for _ in range(5):
            await fleet.push(seconds=200)
            await asyncio.sleep(1)

    fleet = supervise(story, config=HealthConfig(dead_after_s=30))
    assert [event.new for event in fleet.events] == ["healthy", "healthy"]


def test_an_engine_that_a_push_did_not_reach_is_dead_and_the_others_serve_on():
    async def story(fleet: ScriptedFleet) -> None:
        await fleet.push(failing=[FIRST])
        assert fleet.supervisor.serving == (SECOND,)
        await asyncio.sleep(0.2)
        assert fleet.routed == (SECOND,)
        await asyncio.sleep(30)

    fleet = supervise(story)
    assert fleet.path(FIRST) == ["healthy", *REVIVED]
    assert fleet.events[2].reason == "version 4 did not reach it: refused"
    assert fleet.servers[0].version == 4


def test_an_engine_that_somebody_else_started_anew_is_found_by_its_weights():
    async def story(fleet: ScriptedFleet) -> None:
        fleet.servers[1].version = 0
        await asyncio.sleep(30)

    fleet = supervise(story)
    assert fleet.path(SECOND) == ["healthy", *REVIVED]
    assert "it serves version 0 instead of 3" in fleet.events[2].reason


def test_what_a_returned_engine_still_runs_is_ended_before_it_serves():
    async def story(fleet: ScriptedFleet) -> None:
        fleet.servers[0].orphans = 7
        fleet.servers[0].die()
        await fleet.supervisor.wait_serving()
        await asyncio.sleep(30)

    assert supervise(story).servers[0].orphans == 0


def test_failed_restarts_are_further_and_further_apart():
    config = HealthConfig(backoff_s=1, backoff_max_s=8, max_restarts=6)

    async def story(fleet: ScriptedFleet) -> None:
        fleet.servers[0].failing_starts = 5
        fleet.servers[0].die()
        began = now()
        while fleet.path(FIRST)[-1:] != ["healthy"] or len(fleet.path(FIRST)) == 1:
            await asyncio.sleep(0.1)
        assert now() - began == pytest.approx(1 + 2 + 4 + 8 + 8 + 8 + 6 * START_S, abs=2)

    fleet = supervise(story, config=config)
    assert fleet.servers[0].starts == 6


def test_an_engine_that_does_not_come_back_is_given_up_and_the_others_serve_on():
    async def story(fleet: ScriptedFleet) -> None:
        fleet.servers[0].failing_starts = 1000
        fleet.servers[0].die()
        await asyncio.sleep(1000)
        assert fleet.routed == (SECOND,)

    fleet = supervise(story, config=HealthConfig(max_restarts=3))
    assert fleet.servers[0].starts == 3
    assert fleet.path(FIRST)[-1] == "given_up"
    assert fleet.supervisor.metrics()["engine/given_up"] == 1


def test_restarts_before_a_healthy_spell_no_longer_count():
    async def story(fleet: ScriptedFleet) -> None:
        for _ in range(6):
            fleet.servers[0].die()
            await asyncio.sleep(200)

    fleet = supervise(story, config=HealthConfig(max_restarts=2, healthy_spell_s=100))
    assert fleet.path(FIRST)[-1] == "healthy"
    assert fleet.servers[0].starts == 6


def test_a_fleet_without_a_healthy_engine_pauses_with_the_reason_and_goes_on_by_itself():
    async def story(fleet: ScriptedFleet) -> None:
        await asyncio.sleep(1)
        fleet.servers[0].die()
        await asyncio.sleep(1)
        assert fleet.pauses == []
        fleet.servers[1].die()
        await asyncio.sleep(0.2)
        assert fleet.pauses == ["no engine is healthy; the last was http://engine-1: exited with status 137"]
        assert fleet.routed == ()
        await asyncio.sleep(60)

    fleet = supervise(story)
    assert fleet.pauses[1:] == [None]
    assert set(fleet.routed) == {FIRST, SECOND}
    assert 10 <= fleet.supervisor.metrics()["engine/paused_seconds"] <= 13


def test_a_fleet_that_stays_away_ends_the_run_with_the_last_lines_of_every_log():
    async def story(fleet: ScriptedFleet) -> None:
        for server in fleet.servers:
            server.start_s = 1e6
            server.die()
        await asyncio.sleep(1e5)

    with pytest.raises(BaseExceptionGroup) as caught:
        supervise(story, config=HealthConfig(pause_limit_s=600))
    error = caught.value.exceptions[0]
    assert isinstance(error, FleetLostError)
    assert "No engine has served for 600 s" in str(error)
    assert "last words of http://engine-0" in str(error)
    assert "last words of http://engine-1" in str(error)


def test_a_fleet_whose_every_engine_was_given_up_ends_the_run_at_once():
    async def story(fleet: ScriptedFleet) -> None:
        for server in fleet.servers:
            server.failing_syncs = 1000
            server.die()
        await asyncio.sleep(1e5)

    with pytest.raises(BaseExceptionGroup) as caught:
        supervise(story, config=HealthConfig(max_restarts=2))
    assert "Every engine was given up" in str(caught.value.exceptions[0])
    assert "the sync was refused" in str(caught.value.exceptions[0])


def test_routing_that_fails_is_tried_until_it_holds():
    async def story(fleet: ScriptedFleet) -> None:
        await asyncio.sleep(1)
        fleet.failing_routes = 4
        fleet.servers[0].die()
        await asyncio.sleep(4)
        assert fleet.routed == (SECOND,)

    supervise(story)


@pytest.mark.parametrize(
    "fields", [{"dead_after_s": 0}, {"suspect_after": 0}, {"max_restarts": -1}, {"backoff_s": 9, "backoff_max_s": 1}]
)
def test_thresholds_out_of_range_are_refused(fields: dict[str, float]):
    with pytest.raises(EngineConfigError, match=rf"`({'|'.join(fields)})` is -?\d+; it must be (positive|at least)"):
        HealthConfig(**fields)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("seed", range(40))
def test_under_any_schedule_of_faults_no_stale_engine_is_routed_to_and_all_come_back(seed: int):
    rng = random.Random(seed)
    config = HealthConfig(dead_after_s=rng.choice([10, 60]), max_restarts=1000, backoff_max_s=20)

    async def faults(fleet: ScriptedFleet) -> None:
        for _ in range(25):
            await asyncio.sleep(rng.expovariate(1 / rng.choice([0.3, 5, 40])))
            server = rng.choice(fleet.servers)
            match rng.randrange(7):
                case 0 | 1:
                    server.die()
                case 2:
                    server.answers = False
                case 3:
                    server.generates = False
                case 4:
                    server.failing_starts = rng.randrange(3)
                case 5:
                    server.failing_syncs = rng.randrange(3)
                case _:
                    fleet.failing_routes = rng.randrange(4)

    async def trainer(fleet: ScriptedFleet) -> None:
        while True:
            await asyncio.sleep(rng.uniform(0.1, 20))
            failing = [s.url for s in fleet.servers if rng.random() < 0.1]
            await fleet.push(seconds=rng.uniform(0.1, 5), failing=failing)

    async def observer(fleet: ScriptedFleet) -> None:
        while True:
            assert fleet.stale() == []
            is_paused = bool(fleet.pauses) and fleet.pauses[-1] is not None
            assert is_paused == (not fleet.supervisor.serving)
            await asyncio.sleep(0.6)

    async def story(fleet: ScriptedFleet) -> None:
        async with asyncio.TaskGroup() as tasks:
            others = [tasks.create_task(trainer(fleet)), tasks.create_task(observer(fleet))]
            await faults(fleet)
            others[0].cancel()
            for server in fleet.servers:
                server.failing_starts = server.failing_syncs = 0
            await asyncio.sleep(400)
            others[1].cancel()
        assert set(fleet.routed) == set(fleet.by_url)
        assert fleet.stale() == []

    fleet = supervise(story, engines=rng.randint(1, 4), config=config)
    assert all(state is EngineState.HEALTHY for state in fleet.supervisor.states.values())
