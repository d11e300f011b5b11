"""Everything a report shows, read from a run directory in any state: finished, running, killed, empty."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from miles_rollout.fates import FateCounts
from miles_tito.errors import MilesError
from miles_tito.records import Group
from tokenizers import Tokenizer

from miles_core.durable.ledger import LEDGER, queries, reading, trained_over_the_run
from miles_core.durable.spool import read_group, read_groups
from miles_core.monitor.base import RunSummary
from miles_core.monitor.jsonl import DISCARDED_FILE, read_metrics, read_summary

from .conversations import ShownEpisode, pick_episodes
from .fates import Discard, RunFates, read_discards, read_fates
from .history import Floats, RunHistory, read_evaluations, read_events, read_group_spans, read_history
from .wall_time import TimeSplit, make_timeline, split_time

MOMENTS = 4
"""Points of the run that conversations are shown from, first and last included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerData:
    """What a report takes from the ledger, all of one moment; empty where there is none."""

    history: RunHistory = field(default_factory=RunHistory)
    fates: RunFates = field(default_factory=RunFates)
    discards: Sequence[Discard] = ()
    evaluations: Sequence[Mapping[str, Any]] = ()
    events: Mapping[str, Any] = field(default_factory=dict)
    group_spans: Mapping[str, Floats] = field(default_factory=dict)
    """Worker -> when its groups ran."""
    counts: FateCounts | None = None
    """Groups by fate."""
    trained: Sequence[tuple[Group, str]] = ()
    """A few groups spread over the run, with their fates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunData:
    """One run as the report sees it."""

    path: Path
    rows: Sequence[Mapping[str, float]]
    dropped_rows: Sequence[Mapping[str, float]]
    """Of steps that rewinds left behind."""
    warm_up: Sequence[Mapping[str, float]]
    """Steps of SFT before RL."""
    summary: RunSummary | None
    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    ledger: LedgerData
    time: TimeSplit
    shown: Sequence[ShownEpisode]
    notes: Sequence[str]
    """What could not be read."""

    def logged(self, metric: str) -> list[float]:
        """Every finite value of a metric."""
        return [row[metric] for row in self.rows if math.isfinite(row.get(metric, math.nan))]

    def timeline(self) -> dict[str, Any] | None:
        return make_timeline(self.ledger.history, self.ledger.group_spans, [*self.rows, *self.dropped_rows])


def read_run(path: Path) -> RunData:
    """Read `path`; a file that is missing is empty, one that is damaged becomes a note."""
    notes: list[str] = []
    rows = read_metrics(path)
    ledger = read_ledger(path, notes)
    groups = ledger.trained
    with _noted("Conversations", notes):
        groups = [*(groups or _spooled(path / "trajectories")), *_held_out(path / "eval")]
    summary = None
    with _noted("The summary", notes):  # a disk that was full at the end of the run leaves a part of it
        summary = read_summary(path)
    return RunData(
        path=path,
        rows=rows,
        dropped_rows=read_metrics(path, DISCARDED_FILE),
        warm_up=read_metrics(path / "sft"),
        summary=summary,
        config=_json(path / "config.json", notes),
        environment=_json(path / "environment.json", notes),
        ledger=ledger,
        time=split_time(ledger.history, rows),
        shown=pick_episodes(groups),
        notes=notes,
    )


def read_ledger(run: Path, notes: list[str]) -> LedgerData:
    """Empty where there is no ledger, or none that can be read; then `notes` says why."""
    trajectories = run / "trajectories"
    if not (run / LEDGER).exists():
        return LedgerData()
    with _noted("The ledger", notes), reading(run / LEDGER) as db:
        db.execute("BEGIN")  # all of it is of one moment, whatever the run writes meanwhile
        history, fates = read_history(db), read_fates(db)
        trained: list[tuple[Group, str]] = []
        with _noted("Conversations", notes):
            for version, place in trained_over_the_run(db, MOMENTS):
                trained.append((read_group(trajectories, place), f"trained at step {version}"))
        return LedgerData(
            history=history,
            fates=fates,
            counts=queries.counts(db),
            discards=read_discards(db, fates, trajectories),
            evaluations=read_evaluations(db),
            events=read_events(db, history),
            group_spans=read_group_spans(db, history),
            trained=trained,
        )
    return LedgerData()


def load_tokenizer(run: RunData) -> Tokenizer | None:
    """The tokenizer of the run's model, from the run directory or from where the model came; None if it is gone."""
    model = run.config.get("model")
    path = model.get("path") if isinstance(model, Mapping) else None
    places = [run.path / "tokenizer.json", *sorted(run.path.glob("**/tokenizer.json"))]
    if isinstance(path, str):
        places.append(Path(path).expanduser() / "tokenizer.json")
    found = next((place for place in places if place.is_file()), None)
    return Tokenizer.from_file(str(found)) if found else None


@contextmanager
def _noted(what: str, notes: list[str]) -> Iterator[None]:
    """What cannot be read in the block becomes a note."""
    try:
        yield
    except (MilesError, OSError, ValueError, TypeError) as error:
        notes.append(f"{what} could not be read: {error}")


def _spooled(trajectories: Path) -> list[tuple[Group, str]]:
    """`MOMENTS` groups at even distances over the run, first and last included, whatever became of them."""
    kept = [group for group in _sparse(_groups_in(trajectories)) if any(e.trajectories for e in group.episodes)]
    kept.sort(key=lambda g: min((v for e in g.episodes if (v := e.oldest_version) is not None), default=-1))
    count = min(MOMENTS, len(kept))
    return [(kept[round(i * (len(kept) - 1) / max(count - 1, 1))], "") for i in range(count)]


def _held_out(evaluations: Path) -> list[tuple[Group, str]]:
    """The worst and the best group of the newest evaluation whose conversations are kept."""
    steps = {int(folder.name.removeprefix("step-")): folder for folder in evaluations.glob("step-*")}
    if not steps:
        return []
    scored = [
        (fmean(rewards), group)
        for group in _sparse(_groups_in(steps[max(steps)]))
        if (rewards := [e.reward for e in group.episodes if e.reward is not None])
    ]
    scored.sort(key=lambda one: one[0])
    return [(group, f"held out, weights of step {max(steps)}") for _, group in scored[:1] + scored[1:][-1:]]


def _groups_in(folder: Path) -> Iterator[Group]:
    return (group for file in sorted(folder.glob("*.spool")) for group in read_groups(file))


def _sparse(groups: Iterator[Group], *, keep: int = 64) -> list[Group]:
    """Between `keep` and twice as many groups at even distances, without ever holding more: spools may be gigabytes."""
    kept: list[Group] = []
    stride = 1
    for index, group in enumerate(groups):
        if index % stride == 0:
            kept.append(group)
        if len(kept) == 2 * keep:
            kept, stride = kept[::2], 2 * stride
    return kept


def _json(path: Path, notes: list[str]) -> dict[str, Any]:
    content: object = None
    if path.exists():
        with _noted(path.name, notes):
            content = json.loads(path.read_text(encoding="utf-8"))
    return content if isinstance(content, dict) else {}
