"""`make chaos`: every seed keeps the invariants, a failing one replays, and a bug that is planted is found."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chaos.clock import StuckError, VirtualLoop, run
from chaos.command import describe
from chaos.engines import ScriptedServer
from chaos.faults import KINDS, MOST_STARTS, Fault, draw_faults
from chaos.record import Record
from chaos.seed import Verdict, play, shrink
from chaos.settings import draw_config
from chaos.trainers import Gang
from miles_core.durable.ledger import Ledger, OpenGroup, queries
from miles_core.durable.spool import SpoolWriter
from miles_core.monitor import JsonlMonitor
from miles_core.run import resume_state, rl
from miles_rollout.buffer import GroupBuffer

# pyright: reportPrivateUsage=false

pytestmark = pytest.mark.timeout(420)

SEEDS = 100
PATH = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "packages" / "miles-core" / "tests")]


def chaos(*words: str, hash_seed: str = "0") -> tuple[int, list[dict[str, Any]], str]:
    """Exit status, one result a seed, and the summary."""
    done = subprocess.run(
        [sys.executable, "-m", "chaos", "--json", *words],
        env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(PATH)},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def test_every_seed_keeps_every_invariant() -> None:
    status, verdicts, summary = chaos("--seeds", str(SEEDS))
    broken = [
        (verdict["seed"], verdict["problems"], verdict["happened"]) for verdict in verdicts if not verdict["sound"]
    ]
    assert (status, broken) == (0, [])
    assert len(verdicts) == SEEDS
    assert "every invariant held" in summary
    happened = {fault["kind"] for verdict in verdicts for fault in verdict["happened"]}
    assert happened == set(KINDS), "each kind of fault was met"


def test_a_seed_is_the_same_run_in_every_process() -> None:
    one, other = (chaos("--seed", "7", "--seeds", "6", hash_seed=hash_seed)[1] for hash_seed in ("1", "2"))
    assert one == other
    assert sum(verdict["events"] for verdict in one) > 1000


@pytest.mark.parametrize("count", ["0", "-1"])
def test_no_seeds_prove_nothing(count: str) -> None:
    status, verdicts, words = chaos("--seeds", count)
    assert (status, verdicts) == (2, [])
    assert f"--seeds is {count}" in words


def test_the_limits_of_a_configuration_are_played(tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text(
        "[run]\nsteps = 3\n[rollout]\ngroup_size = 2\ngroups_per_step = 2\nmax_staleness = 0\n"
    )
    status, (verdict,), _ = chaos("@", "quickstart", "@", str(tmp_path / "my.toml"), "--seed", "1")
    assert (status, verdict["sound"]) == (0, True)


# ---- bugs that are planted


def nothing_returns(_: Any, version: int) -> list[tuple[int, str]]:
    """What was trained behind the last commit stays trained."""
    return []


def patch(owner: Any, **new: Any) -> None:
    """In the process of one start, which ends with it."""
    for name, value in new.items():
        assert hasattr(owner, name), f"{owner} has no {name} to break: the bug would be planted nowhere"
        setattr(owner, name, value)


def plant_no_return() -> None:
    patch(queries, groups_of_steps_after=nothing_returns)


def plant_admission_before_the_spool() -> None:
    """A worker keeps its newest record in memory, and hands the group out."""
    write = SpoolWriter._write

    def one_behind(self: Any, record: bytes) -> None:
        held, self._held = getattr(self, "_held", b""), record
        write(self, held)

    patch(SpoolWriter, _write=one_behind)


def plant_cursor_without_what_runs() -> None:
    """The position in the data is kept, what was under way at that position is not."""
    whole = resume_state.resume_state

    def only_finished(*args: Any, **kwargs: Any) -> Any:
        resume = whole(*args, **kwargs)
        kept = tuple(group for group in resume.groups if group.ref is not None)
        return replace(resume, groups=kept, counts=replace(resume.counts, in_flight=len(kept)))

    patch(rl, resume_state=only_finished)


def plant_cursor_of_the_last_commit() -> None:
    """The position in the data is the checkpoint's, and what was issued since then is drawn again."""
    patch(Ledger, drawn=lambda self: max(0, queries.drawn(self._db) - 3))


def plant_late_snapshot() -> None:
    """A checkpoint holds the trainer as it is when it is written, not when it was due."""

    async def begin_save(self: Gang, path: Path) -> None:
        async def late() -> None:
            await self._world.wait(20.0)
            await self.write(path, json.dumps(dataclasses.asdict(self.now)))

        self._writing = asyncio.create_task(late())

    patch(Gang, begin_save=begin_save)


def recorded_versions(_: OpenGroup, oldest: int | None, newest: int | None) -> tuple[int, int] | None:
    return None if oldest is None or newest is None else (oldest, newest)


def plant_versions_as_recorded() -> None:
    """Versions of a dead branch count like those of the living one."""
    patch(OpenGroup, versions=recorded_versions)


def plant_engine_left_behind() -> None:
    """A push reports an engine that kept its old weights under the new name."""
    serve = ScriptedServer.serve

    def stubborn(self: Any, node: int, version: int) -> None:
        old = getattr(self, "first", node)
        self.first = old
        serve(self, old if self.url.endswith("1") else node, version)

    patch(ScriptedServer, serve=stubborn)


def plant_metrics_of_dead_steps() -> None:
    patch(JsonlMonitor, rewind=lambda self, step: None)


def plant_lost_credit() -> None:
    """A credit that was not used is not given back, and one of every step is lost."""
    release = GroupBuffer.release

    def all_but_one(self: Any, groups: Any) -> None:
        release(self, groups)
        self._queue.reserved += 1

    patch(GroupBuffer, release=all_but_one)


def plant_same_attempt() -> None:
    """What runs again runs under the numbers that it ran under before."""
    whole = resume_state.resume_state

    def lowered(*args: Any, **kwargs: Any) -> Any:
        resume = whole(*args, **kwargs)
        return replace(resume, groups=tuple(replace(group, attempt=0) for group in resume.groups))

    patch(rl, resume_state=lowered)


@pytest.mark.parametrize(
    ("plant", "words"),
    [
        (plant_no_return, "trained"),
        (plant_admission_before_the_spool, "SpoolError"),
        (plant_cursor_without_what_runs, "never ran it"),
        (plant_cursor_of_the_last_commit, "next in the stream was"),
        (plant_late_snapshot, "but the ranks hold"),
        (plant_versions_as_recorded, "steps away from its weights"),
        (plant_engine_left_behind, "steps away from its weights"),
        (plant_metrics_of_dead_steps, "rows of step"),
        (plant_lost_credit, "No step, push or commit"),
        (plant_same_attempt, "was opened 2 times"),
    ],
)
def test_a_planted_bug_is_found(plant: Callable[[], None], words: str) -> None:
    assert hunt(plant, words).problems


def hunt(plant: Callable[[], None], words: str, *, most: int = 60) -> Verdict:
    """The first seed that a bug breaks with a problem that says `words`, without the help of the ledger's own proof."""

    def alone() -> None:
        patch(Ledger, require_sound=lambda self: None)
        plant()

    seen: list[str] = []
    for seed in range(most):
        verdict = play(seed, draw_config(seed), draw_faults(seed), plant=alone)
        if any(words in problem.text for problem in verdict.problems):
            return verdict
        seen += [problem.text for problem in verdict.problems]
    raise AssertionError(f"{most} seeds do not show it: {seen}")


def test_a_failing_seed_tells_its_faults_the_invariant_and_the_story_of_the_group() -> None:
    verdict = hunt(plant_same_attempt, "was opened 2 times")
    config = draw_config(verdict.seed)
    again = play(verdict.seed, config, verdict.faults, plant=plant_same_attempt)
    assert again.problems == verdict.problems
    small = shrink(verdict, config, plant=plant_same_attempt)
    assert 1 <= len(small.faults) <= len(verdict.faults)
    text = describe(small)
    assert "the driver is killed" in text or "trainer" in text or "Ctrl-C" in text
    assert "was opened 2 times" in text
    assert f"Group {small.problems[0].group}" in text
    assert f"again: make chaos SEED={small.seed}" in text


# ---- what it is made of


def play_on(loop: VirtualLoop, main: Coroutine[Any, Any, Any]) -> Any:
    with contextlib.closing(loop):
        return run(main, loop)


def test_a_deadlock_is_an_error_at_once() -> None:
    async def wait_for_ever() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(StuckError, match="a deadlock"):
        play_on(VirtualLoop(), wait_for_ever())


@pytest.mark.parametrize(("sleep_s", "words"), [(0.0, "events at"), (5.0, "No step, push or commit for 100 virtual")])
def test_a_run_that_gets_nowhere_is_an_error(sleep_s: float, words: str) -> None:
    async def spin() -> None:
        while True:
            await asyncio.sleep(sleep_s)

    with pytest.raises(StuckError, match=words):
        play_on(VirtualLoop(most_events=500, patience_s=100.0), spin())


def test_other_threads_work_in_their_turn_and_one_executor_keeps_its_order() -> None:
    done: list[int] = []
    took = iter([5.0, 1.0, 2.0])

    async def main() -> float:
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(1) as disk:
            await asyncio.gather(*(loop.run_in_executor(disk, done.append, i) for i in range(2)))
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 // 0)
        return loop.time()

    assert play_on(VirtualLoop(disk_s=lambda: next(took)), main()) == 8.0
    assert done == [0, 1]


def test_every_callback_is_an_event_of_its_own() -> None:
    seen: list[int] = []

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(3):
                tasks.create_task(asyncio.sleep(1))

    loop = VirtualLoop(on_event=seen.append)
    play_on(loop, main())
    assert seen == list(range(1, loop.events + 1))
    assert loop.time() == 1.0


def test_weights_are_as_far_apart_as_the_way_through_their_tree(tmp_path: Path) -> None:
    record = Record(tmp_path / "record.jsonl")
    first = record.new_weights(parent=-1, version=0)
    one = record.new_weights(parent=first, version=1)
    dead = record.new_weights(parent=one, version=2)
    dead = record.new_weights(parent=dead, version=3)
    alive = record.new_weights(parent=one, version=2)
    tree = Record(tmp_path / "record.jsonl").weights()
    assert [tree.distance(alive, node) for node in (alive, one, first, dead)] == [0, 1, 2, 3]
    assert (tree.version(dead), tree.version(alive)) == (3, 2)


def test_faults_are_drawn_from_the_seed_and_what_can_happen() -> None:
    assert draw_faults(5) == draw_faults(5) != draw_faults(6)
    drawn = [fault for seed in range(300) for fault in draw_faults(seed, {"kill": 9, "push_fails": 2})]
    assert {fault.kind for fault in drawn} == {"kill", "push_fails"}
    assert {fault.start for fault in drawn} == set(range(MOST_STARTS))
    assert {fault.nth for fault in drawn if fault.kind == "kill"} == set(range(1, 10))
    assert str(Fault(kind="push_fails", start=1, nth=2)) == "start 1: an engine refuses a push, at occasion 2"
