"""A run directory with a ledger, played on a clock of its own: rewinds, discards, evaluations, a dead engine."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from miles_core.durable.ledger import Ledger, Limits
from miles_core.durable.spool import SpoolWriter
from miles_core.monitor import JsonlMonitor
from miles_rollout.fates import Fate, FateEvent
from miles_tito.records import Episode, Group, Outcome, Trajectory, VersionSpan
from miles_tito.records.summary import GroupRef, summarize

TOKENS = 8
SAMPLED = 5


@dataclass
class Clock:
    now: float = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now

    def go(self, seconds: float) -> None:
        self.now += seconds


class LongRun:
    """Plays a run step by step; every number it writes is known to the test."""

    def __init__(self, path: Path, *, workers: int = 2, group_size: int = 2) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.clock = Clock()
        self.ledger = Ledger.open(path / "ledger.db", create=True, clock=self.clock)
        self.rows: list[dict] = []
        self._group_size = group_size
        self._spools = [SpoolWriter(path / "trajectories", f"worker-{i}") for i in range(workers)]
        self._rng = random.Random(0)
        self._issued = 0

    def start(self, from_step: int | None = None) -> None:
        """A process begins; its start-up takes no time yet."""
        self.ledger.start(from_step, limits=Limits(max_staleness=2, credits=None, retries=0))

    def issue(self, count: int = 1, *, version: int = 0) -> list[str]:
        names = [f"g{self._issued + i:06d}" for i in range(count)]
        self._issued += count
        for name in names:
            self.ledger(_event(name, Fate.IN_FLIGHT, version))
        return names

    def finish(
        self,
        names: Sequence[str],
        *,
        version: int = 0,
        error: str | None = None,
        buffered: bool = True,
        seconds: float = 0.0,
    ) -> None:
        """
        Args:
            seconds: that each episode took.
        """
        for i, name in enumerate(names):
            group = self._group(name, version, error, seconds)
            place = self._spools[i % len(self._spools)].append(group)
            self.ledger.finished(replace(summarize(group), metadata={"spool": (place.file, place.offset)}))
            if buffered:
                self.ledger(_event(name, Fate.BUFFERED, version))

    def end(self, names: Sequence[str], fate: Fate, reason: str, *, version: int = 0) -> None:
        for name in names:
            self.ledger(_event(name, fate, version, reason))

    def step(self, version: int, names: Sequence[str], *, wait: float = 4.0, train: float = 5.0, sync: float = 1.0):
        """Takes `wait + train + sync` seconds on the clock and leaves a row."""
        self.clock.go(wait + train + sync)
        for name in names:
            self.ledger(_event(name, Fate.TRAINED, version))
        groups = [GroupRef(id=name, prompt_id="", episodes=()) for name in names]
        self.ledger.step(version, groups, facts={"seconds": wait + train + sync})
        self.rows.append(
            {
                "step": version,
                "time": self.clock(),
                "time/take_wait": wait,
                "time/train": train,
                "time/sync": sync,
                "time/on_step": 0.0,
                "time/step": wait + train + sync,
                "reward/mean": 0.5 + version / 1000,
                "reward/std": 0.1,
                "engine/utilisation": 0.7,
                "engine/tokens_per_s": 1000.0,
                "sync/pause_seconds": 0.4,
                "sync/total_seconds": sync,
                "sync/load_seconds": 0.3,
                "sync/send_seconds": 0.5,
            }
        )

    def checkpoint(self, version: int, *, pause: float = 0.5, written: float = 1.0) -> None:
        """Training stands still for `pause` seconds; the files are whole `written` seconds later."""
        self.clock.go(pause)
        self.rows[-1] |= {"time/checkpoint": pause, "time/checkpoint_wait": 0.0, "time/on_step": pause}
        self.rows[-1]["time"] += pause
        self.clock.go(written)
        self.ledger.commit(version, f"step-{version:06d}")
        self.clock.go(-written)

    def evaluate(self, version: int, score: float | None, *, seconds: float, lag: int = 0, reason: str = "") -> None:
        """An evaluation that ends now plus `seconds`, with the clock."""
        self.clock.go(seconds)
        known = {} if score is None else {"eval/score_low": score - 0.1, "eval/score_high": score + 0.1}
        self.ledger.evaluated(
            "*" if score is None else "eval",
            version=version,
            logged_version=version + lag,
            score=score,
            reason=reason,
            seconds=seconds,
            metrics=known,
        )

    def write(self) -> Path:
        """Close the files; rows of steps that a rewind took back go where the monitor would have put them."""
        self.ledger.close()
        live: dict[int, dict] = {}
        gone: list[dict] = []
        for row in self.rows:
            later = [step for step in live if step >= row["step"]]
            gone += [live.pop(step) for step in later]
            live[row["step"]] = row
        for file, rows in (("metrics.jsonl", live.values()), ("metrics.discarded.jsonl", gone)):
            (self.path / file).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return self.path

    def _group(self, name: str, version: int, error: str | None, seconds: float) -> Group:
        episodes = [self._episode(name, i, version, error, seconds) for i in range(self._group_size)]
        return Group(id=name, prompt_id=f"p-{name}", episodes=tuple(episodes))

    def _episode(self, name: str, index: int, version: int, error: str | None, seconds: float) -> Episode:
        mask = np.array([i >= TOKENS - SAMPLED for i in range(TOKENS)])
        told = Trajectory(
            id=f"{name}-{index}.0:0",
            tokens=np.arange(TOKENS),
            loss_mask=mask,
            logprobs=np.where(mask, -self._rng.expovariate(1.5), 0.0).astype(np.float32),
            versions=(VersionSpan(start=TOKENS - SAMPLED, end=TOKENS, version=version),),
        )
        return Episode(
            id=f"{name}/{index}",
            prompt_id=f"p-{name}",
            group_id=name,
            outcome=Outcome.INFRA_ABORT if error else Outcome.GRADED,
            reward=None if error else float(index % 2),
            error=error,
            trajectories=() if error else (told,),
            finished_at=self.clock(),
            seconds=seconds,
        )


def _event(name: str, fate: Fate, version: int, reason: str = "") -> FateEvent:
    return FateEvent(group_id=name, prompt_id=f"p-{name}", fate=fate, reason=reason, version=version)


def play(path: Path, *, steps: int = 30, hostile: str = "") -> Path:
    """A run with one of everything: killed behind its middle, taken up again, a trainer rank lost near its end."""
    run = LongRun(path)
    (path / "config.json").write_text(json.dumps({"run": {"name": path.name, "steps": steps}, "model": {"path": "m"}}))
    run.start()
    run.clock.go(30)
    run.ledger.event("engine", "http://127.0.0.1:30000", "starting → healthy: started")
    run.evaluate(0, 0.2, seconds=8)
    committed, step, killed, lost = 0, 0, False, False
    while step < steps:
        step += 1
        names = run.issue(6, version=step - 1)
        run.clock.go(0.2 + 0.5 * (step % 3))
        run.finish(names[:4], version=step - 1)
        run.finish(names[4:5], version=step - 1, buffered=False)
        run.end(names[4:5], Fate.FILTERED, hostile or "zero_spread", version=step - 1)
        if step % 4 == 0:
            run.finish(names[5:], version=step - 1, error="ConnectionError: sandbox gone", buffered=False)
            run.end(names[5:], Fate.FAILED, "too_few_rewards", version=step - 1)
        elif step % 3 == 0:
            run.finish(names[5:], version=step - 1)
            run.end(names[5:], Fate.STALE, "stale", version=step)
        if step == steps - 8:
            run.ledger.event("run", "pause", "every engine is dead")
            run.clock.go(5)
            run.ledger.event("run", "pause", "over")
            run.clock.go(-5)
        run.step(step, names[:4], wait=1 + 6 * (step % 2))
        if step % 5 == 0 and step > committed:
            run.checkpoint(step)
            committed = step
        if step % 6 == 0:
            run.evaluate(step, 0.2 + 0.6 * step / steps, seconds=5, lag=0)
        if step == steps // 2 + 2 and not killed:
            killed = True
            run.clock.go(4)
            run.ledger.event("engine", "http://127.0.0.1:30000", f"healthy → dead: {hostile or 'exit code -9'}")
            run.clock.go(60)
            run.start(committed)
            step = committed
            run.clock.go(20)
            run.finish([g.id for g in run.ledger.open_groups() if g.address is None], version=step, seconds=3)
        elif step == steps - 3 and not lost:
            lost = True
            run.clock.go(3)
            run.ledger.event("trainer", "all ranks", "restarted: rank 0 died")
            run.clock.go(12)
            run.ledger.rewind(committed)
            step = committed
        elif step == steps - 8:
            run.evaluate(step, None, seconds=0.1, reason="TimeoutError: 600 s were not enough")
    run.evaluate(steps, 0.8, seconds=8)
    run.ledger.abort_open("run ended")
    return run.write()


def finish_run(path: Path) -> None:
    """The summary that a run writes when it ends."""
    from miles_core.monitor import RunSummary

    JsonlMonitor(path).finish(RunSummary(status="finished", steps=30, seconds=100.0))
