"""Synchronous against asynchronous training on episodes that mostly sleep, and how near each comes to its bound.

    python benchmarks/loop.py              about a minute and a half of wall time
    python benchmarks/loop.py --virtual    in simulated seconds: the schedule alone, without the machine's noise
    python benchmarks/loop.py --json       the same numbers as JSON

The real worker, producer, buffer, batch planning and loop run in one process; sessions, trainer and push sleep. An
episode is four turns of a model call and a tool delay. Its length is drawn from its id, so that every row plays the
same trace; one episode in ten takes eight times as long. An engine runs at most P episodes at once (its slots).

A step trains G groups of N siblings and takes t seconds, push included. Episode i sleeps d_i seconds, a group D_g, the
longest of its siblings; s is `max_staleness`. Bounds on samples a second, from the lengths of the episodes that ran:

- Synchronous (s = 0): generate, train, push, one after the other, so G N / (mean(M) + t), where M is what the G N
  episodes of a step take on P slots, first come first served, with nothing lost between them.
- Asynchronous: the least of what no schedule can beat,
    slots      P / mean(d)                       a slot runs one episode at a time
    trainer    G N / t                           a step begins when the one before is pushed
    credits    (s + 1) G N / (mean(D) + t)       a group holds a credit while it runs and while it is trained, and
                                                 there are (s + 1) G of them
    age        (s + 1) G N / (mean(D*) + t)      only with `stragglers = "wait"`, which gives up no group: the longest
                                                 group issued under version k, D*_k, starts after push k and is trained
                                                 before push k + s + 1, which are D*_k + t apart at least

With `overtake` a group that is too old is discarded: its episodes count as work and not as samples, so that discards
lower `achieved / bound`. The last column says whom that hits: the share of long episodes among the trained ones over
their share among all; 1 is fair. The first steps, in which the pipeline fills, are not counted.

Two loads. The first waits for slots and is measured. In the second the engine has room for every episode, and a long
one outlasts several steps: there staleness is what limits, and simulated time shows it without noise.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
from miles_core.batching import AdvantagesByEpisode, Trained, plan_ranks
from miles_core.monitor import RunSummary
from miles_core.run import loop
from miles_rollout import (
    Fate,
    FateEvent,
    GroupBuffer,
    PromptStream,
    RolloutConfig,
    Worker,
    advantages_by_episode,
    produce,
)
from miles_tito import Ctx, EpisodeResult, Outcome, Policy, Prompt, Sampling, Trajectory, VersionSpan
from miles_tito.records.summary import GroupRef

sys.path.insert(0, str(Path(__file__).parents[1] / "packages" / "miles-rollout" / "tests"))
from scripted_rollout import run_virtual

WARM_UP = 2
"""Steps before the clock starts."""
MODES: tuple[tuple[int, Literal["overtake", "wait"]], ...] = (
    (0, "overtake"),
    (1, "overtake"),
    (1, "wait"),
    (2, "overtake"),
    (2, "wait"),
)
"""`max_staleness` and `stragglers`; the first is synchronous."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """What is played."""

    group_size: int = 4
    groups_per_step: int = 32
    slots: int = 16
    base_s: float = 0.1
    """Length of an ordinary episode, give or take a fifth."""
    long_share: float = 0.1
    long_factor: float = 8.0
    turns: int = 4
    tool_share: float = 0.5
    """Part of an episode spent in tools."""
    train_s: float = 0.25
    push_s: float = 0.05
    steps: int = 12
    seed: int = 0

    @property
    def batch(self) -> int:
        return self.groups_per_step * self.group_size

    @property
    def step_s(self) -> float:
        return self.train_s + self.push_s

    def duration(self, episode_id: str) -> float:
        """Seconds of an episode, the same in every run."""
        rng = random.Random(f"{self.seed}/{episode_id}")
        return self.base_s * rng.uniform(0.8, 1.2) * (self.long_factor if rng.random() < self.long_share else 1.0)

    def is_long(self, episode_id: str) -> bool:
        return self.duration(episode_id) > 2 * self.base_s


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of a table."""

    max_staleness: int
    stragglers: str
    samples_per_s: float
    bound_per_s: float
    limited_by: str
    staleness_mean: float
    staleness_max: int
    discarded: float
    """Share of the finished groups that were too old to be trained."""
    long_trained: float
    """Share of long episodes among the trained ones, over their share among all that ran."""
    fates: str

    @property
    def achieved(self) -> float:
        return self.samples_per_s / self.bound_per_s


class Sessions:
    """Recording sessions in memory: each call samples one token of the version that is current when it ends."""

    def __init__(self, version: Callable[[], int]) -> None:
        self._version = version
        self._turns: dict[str, list[int]] = {}

    async def open(
        self,
        session_id: str,
        *,
        sampling: Sampling,
        metadata: Mapping[str, object] | None = None,
        deadline_s: float | None = None,
    ) -> Policy:
        self._turns[session_id] = []
        return Policy(base_url="", api_key="", model="scripted", sampling=sampling, session_id=session_id)

    def sample(self, session_id: str) -> None:
        self._turns[session_id].append(self._version())

    async def trajectories(self, session_id: str) -> tuple[Trajectory, ...]:
        versions = self._turns[session_id]
        length = len(versions) + 1
        mask = np.arange(length) > 0
        return (
            Trajectory(
                id=session_id,
                tokens=np.arange(length, dtype=np.int32),
                loss_mask=mask,
                logprobs=np.where(mask, -0.5, 0.0).astype(np.float32),
                versions=tuple(VersionSpan(start=i + 1, end=i + 2, version=v) for i, v in enumerate(versions)),
            ),
        )

    async def close(self, session_id: str) -> None:
        self._turns.pop(session_id, None)


class SleepingEnv:
    """A few turns of a model call and a tool; only the first sibling is right, so that nothing is filtered."""

    def __init__(self, load: Load, sessions: Sessions) -> None:
        self._load = load
        self._sessions = sessions
        self.ran: dict[str, float] = {}
        """Seconds of each episode that ended."""

    def tasks(self, split: str) -> Iterable[Prompt]:
        return [Prompt(id=f"p{i}") for i in range(200)]

    async def run(self, prompt: Prompt, policy: Policy, ctx: Ctx) -> EpisodeResult:
        load, seconds = self._load, self._load.duration(ctx.episode_id)
        began = asyncio.get_running_loop().time()
        for turn in range(load.turns):
            await _sleep_until(began + seconds * (turn + 1 - load.tool_share) / load.turns)
            self._sessions.sample(policy.session_id)
            await _sleep_until(began + seconds * (turn + 1) / load.turns)
        self.ran[ctx.episode_id] = seconds
        return EpisodeResult(outcome=Outcome.GRADED, reward=float(ctx.episode_id.endswith("/0")))

    async def aclose(self) -> None:
        return None


async def _sleep_until(moment: float) -> None:
    """Late timers do not add up, as they would not for an engine and tools that run by themselves."""
    await asyncio.sleep(moment - asyncio.get_running_loop().time())


class SleepingTrainer:
    """Two ranks' plans are made for real; training and pushing sleep. Also the engines and the monitor of the run."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self.version = 0
        self.trained: list[list[str]] = []
        self.staleness: list[int] = []
        self.ended: list[float] = []

    async def train(self, groups: Sequence[GroupRef], *, advantages: AdvantagesByEpisode) -> Trained:
        self.trained.append([episode.id for group in groups for episode in group.episodes])
        self.staleness += [
            self.version - e.oldest_version for g in groups for e in g.episodes if e.oldest_version is not None
        ]
        plan_ranks(groups, advantages=advantages, token_budget=64, ranks=2, minibatches=1)
        await asyncio.sleep(self._load.train_s)
        return Trained(version=self.version + 1, metrics={})

    async def push(self, version: int) -> dict[str, float]:
        await asyncio.sleep(self._load.push_s)
        self.version = version
        return {}

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.ended.append(asyncio.get_running_loop().time())

    def log_late(self, step: int, metrics: Mapping[str, float]) -> None:
        return None

    def rewind(self, step: int) -> None:
        return None

    def event(self, name: str, start: float, end: float, lane: str) -> None:
        return None

    def finish(self, summary: RunSummary) -> None:
        return None


class Play:
    """One run of the loop."""

    def __init__(self, load: Load, *, max_staleness: int, stragglers: Literal["overtake", "wait"] = "overtake") -> None:
        self.load = load
        self.config = RolloutConfig(
            group_size=load.group_size,
            groups_per_step=load.groups_per_step,
            max_staleness=max_staleness,
            stragglers=stragglers,
            max_concurrent_episodes=load.slots,
        )
        self.issued: dict[str, int] = {}
        """Version that each group was issued under."""
        self.trainer = SleepingTrainer(load)
        self.sessions = Sessions(lambda: self.trainer.version)
        self.env = SleepingEnv(load, self.sessions)
        self.buffer = GroupBuffer(self.config, observer=self._observe)

    async def run(self) -> None:
        worker = Worker.from_config(self.config, env=self.env, sessions=self.sessions, run_id="benchmark")
        await loop.run(
            produce=partial(
                produce,
                prompts=PromptStream(list(self.env.tasks("train"))),
                buffer=self.buffer,
                run_group=worker.run_group_ref,
                group_size=self.load.group_size,
            ),
            buffer=self.buffer,
            train=partial(
                self.trainer.train, advantages=partial(advantages_by_episode, advantage=self.config.advantage)
            ),
            push=self.trainer.push,
            monitor=self.trainer,  # pyright: ignore[reportArgumentType]  (made by hand, not by `build_monitor`)
            steps=self.load.steps,
            on_step=loop.nothing_more,
        )
        self.buffer.close()

    def row(self) -> Row:
        load, trainer, counts = self.load, self.trainer, self.buffer.counts()
        bounds = self.bounds()
        limit = min(bounds, key=lambda name: bounds[name])
        trained = [episode for batch in trainer.trained for episode in batch]
        return Row(
            max_staleness=self.config.max_staleness,
            stragglers=self.config.stragglers,
            samples_per_s=(load.steps - WARM_UP) * load.batch / (trainer.ended[-1] - trainer.ended[WARM_UP - 1]),
            bound_per_s=bounds[limit],
            limited_by=limit,
            staleness_mean=statistics.fmean(trainer.staleness),
            staleness_max=max(trainer.staleness),
            discarded=counts.stale / (counts.stale + counts.trained),
            long_trained=statistics.fmean(map(load.is_long, trained))
            / statistics.fmean(map(load.is_long, self.env.ran)),
            fates=self.buffer.proof(),
        )

    def bounds(self) -> dict[str, float]:
        """Samples a second that cannot be exceeded, by name; see the module's text."""
        load, credits = self.load, self.config.max_staleness + 1
        siblings: dict[str, list[float]] = {}
        for episode_id, seconds in self.env.ran.items():
            siblings.setdefault(episode_id.partition("/")[0], []).append(seconds)
        groups = {name: siblings[name] for name in sorted(siblings) if len(siblings[name]) == load.group_size}
        if credits == 1:
            return {"one after the other": load.batch / (self._mean_makespan(list(groups.values())) + load.step_s)}
        bounds = {
            "slots": load.slots / statistics.fmean(d for group in groups.values() for d in group),
            "trainer": load.batch / load.step_s,
            "credits": credits * load.batch / (statistics.fmean(map(max, groups.values())) + load.step_s),
        }
        if self.config.stragglers == "wait":
            longest: dict[int, float] = {}
            for name, group in groups.items():
                longest[self.issued[name]] = max(longest.get(self.issued[name], 0.0), *group)
            counted = [longest[k] for k in range(WARM_UP, load.steps - credits + 1)]
            bounds["age"] = credits * load.batch / (statistics.fmean(counted) + load.step_s)
        return bounds

    def _mean_makespan(self, groups: Sequence[Sequence[float]]) -> float:
        """Of the batches counted, each generated on its own."""
        size = self.load.groups_per_step
        batches = [groups[i * size : (i + 1) * size] for i in range(WARM_UP, self.load.steps)]
        return statistics.fmean(makespan([d for group in batch for d in group], self.load.slots) for batch in batches)

    def _observe(self, event: FateEvent) -> None:
        if event.fate is Fate.IN_FLIGHT:
            self.issued[event.group_id] = event.version


def makespan(durations: Sequence[float], slots: int) -> float:
    """Seconds until the last of `durations` has ended on `slots` slots, first come first served."""
    free = [0.0] * slots
    for seconds in durations:
        heapq.heapreplace(free, free[0] + seconds)
    return max(free)


def measure(load: Load, *, in_simulated_time: bool) -> list[Row]:
    """One row for each of `MODES`."""
    rows: list[Row] = []
    for max_staleness, stragglers in MODES:
        played = Play(load, max_staleness=max_staleness, stragglers=stragglers)
        (run_virtual if in_simulated_time else asyncio.run)(played.run())
        rows.append(played.row())
    return rows


def overhead_ms(load: Load) -> float:
    """Milliseconds of this process's CPU for each trained sample when nothing sleeps: scheduling and planning."""
    played = Play(replace(load, base_s=0.0, train_s=0.0, push_s=0.0), max_staleness=1)
    began = time.process_time()
    asyncio.run(played.run())
    return 1e3 * (time.process_time() - began) / (load.steps * load.batch)


def table(rows: Sequence[Row]) -> str:
    lines = [
        "| max_staleness | stragglers | samples/s | x sync | bound | limited by | achieved / bound "
        "| staleness mean, max | discarded | long ones trained |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row.max_staleness} | {row.stragglers if row.max_staleness else '(synchronous)'} "
            f"| {row.samples_per_s:.1f} | {row.samples_per_s / rows[0].samples_per_s:.2f} | {row.bound_per_s:.1f} "
            f"| {row.limited_by} | **{row.achieved:.2f}** | {row.staleness_mean:.2f}, {row.staleness_max} "
            f"| {row.discarded:.0%} | {row.long_trained:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--virtual", action="store_true", help="simulated time for the first load too")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--seed", type=int, default=0, help="draws the lengths of the episodes")
    parser.add_argument("--steps", type=int, default=Load.steps, help="steps of the first load")
    options = parser.parse_args()
    if options.steps < WARM_UP + 4:
        parser.error(f"--steps is {options.steps}; {WARM_UP} are not counted, so give at least {WARM_UP + 4}.")
    queued = Load(seed=options.seed, steps=options.steps)
    roomy = Load(seed=options.seed, groups_per_step=16, slots=64, steps=30)
    first, second = measure(queued, in_simulated_time=options.virtual), measure(roomy, in_simulated_time=True)
    cost = overhead_ms(queued)
    if options.json:
        tables = [
            {"load": asdict(load), "rows": [asdict(r) | {"achieved": r.achieved} for r in rows]}
            for load, rows in ((queued, first), (roomy, second))
        ]
        print(json.dumps({"tables": tables, "overhead_ms_per_sample": cost}, indent=2))
        return
    clock = "simulated" if options.virtual else "measured"
    print(f"{queued.slots} slots for {queued.batch} episodes a step, {clock}:\n\n{table(first)}\n")
    print(f"{roomy.slots} slots for {roomy.batch} episodes a step, simulated:\n\n{table(second)}\n")
    print(f"overhead of the loop: {cost:.2f} ms a sample (target: at most 5)")


if __name__ == "__main__":
    main()
