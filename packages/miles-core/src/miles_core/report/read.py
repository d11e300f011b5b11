"""Everything a report shows, read from a run directory in any state: finished, running, killed, empty."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from miles_tito.errors import MilesError
from miles_tito.records import Group
from tokenizers import Tokenizer

from miles_core.durable.spool import read_groups
from miles_core.monitor.jsonl import DISCARDED_FILE, read_metrics, read_summary
from miles_core.monitor.summary import RunSummary

from .book import MOMENTS, Book, read_book
from .conversations import Shown, pick
from .effective import TimeSplit, split_time
from .timeline import Timeline, make_timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class RunData:
    """One run as the report sees it."""

    path: Path
    rows: Sequence[Mapping[str, float]]
    warm_up: Sequence[Mapping[str, float]]
    """Steps of SFT before RL."""
    summary: RunSummary | None
    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    book: Book | None = None
    """What the ledger says."""
    dropped: Sequence[Mapping[str, float]] = ()
    """Rows of steps that rewinds left behind."""
    shown: Sequence[Shown] = ()
    notes: Sequence[str] = field(default=())
    """What could not be read."""

    def time(self) -> TimeSplit | None:
        """Where the wall time went; None without a ledger."""
        return split_time(self.book.course, self.rows) if self.book else None

    def timeline(self) -> Timeline | None:
        course, groups = (self.book.course, self.book.groups) if self.book else (None, {})
        return make_timeline(course, groups, [*self.rows, *self.dropped])


def read_run(path: Path) -> RunData:
    """Read `path`; a part that is missing is empty, a part that is damaged becomes a note."""
    notes: list[str] = []
    shown: list[Shown] = []
    book = read_book(path, notes)
    try:
        told = book.trained if book and book.trained else _spooled(path / "trajectories")
        shown = pick([*told, *_held_out(path / "eval")])
    except (MilesError, OSError) as error:
        notes.append(f"Conversations could not be read: {error}")
    return RunData(
        path=path,
        rows=read_metrics(path),
        book=book,
        dropped=read_metrics(path, DISCARDED_FILE),
        warm_up=read_metrics(path / "sft"),
        summary=_summary(path, notes),
        config=_json(path / "config.json", notes),
        environment=_json(path / "environment.json", notes),
        shown=shown,
        notes=notes,
    )


def load_tokenizer(run: RunData) -> Tokenizer | None:
    """The tokenizer of the run's model, from the run directory or from where the model came; None if it is gone."""
    model = run.config.get("model")
    path = model.get("path") if isinstance(model, Mapping) else None
    places = [run.path / "tokenizer.json", *sorted(run.path.glob("**/tokenizer.json"))]
    if isinstance(path, str):
        places.append(Path(path).expanduser() / "tokenizer.json")
    found = next((place for place in places if place.is_file()), None)
    return Tokenizer.from_file(str(found)) if found else None


def _spooled(trajectories: Path) -> list[tuple[Group, str]]:
    """A few groups spread over the run, whatever became of them."""
    spooled = (group for file in sorted(trajectories.glob("*.spool")) for group in read_groups(file))
    kept = [group for group in _sparse(spooled) if any(e.trajectories for e in group.episodes)]
    return [(group, "") for group in _spread(sorted(kept, key=_version))]


def _held_out(evaluations: Path) -> list[tuple[Group, str]]:
    """The worst and the best group of the newest evaluation whose conversations are kept."""
    folders = sorted(evaluations.glob("step-*"), key=lambda folder: int(folder.name.removeprefix("step-")))
    if not folders:
        return []
    groups = _sparse(group for file in sorted(folders[-1].glob("*.spool")) for group in read_groups(file))
    scored = sorted((g for g in groups if any(e.reward is not None for e in g.episodes)), key=_mean_reward)
    fate = f"held out, weights of step {int(folders[-1].name.removeprefix('step-'))}"
    return [(group, fate) for group in ([scored[0], scored[-1]] if len(scored) > 1 else scored)]


def _mean_reward(group: Group) -> float:
    rewards = [episode.reward for episode in group.episodes if episode.reward is not None]
    return sum(rewards) / len(rewards)


def _spread(items: Sequence[Any]) -> list[Any]:
    """At most `MOMENTS` of them at even distances, first and last included."""
    count = min(MOMENTS, len(items))
    return [items[round(i * (len(items) - 1) / max(count - 1, 1))] for i in range(count)]


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


def _version(group: Group) -> int:
    return min((v for e in group.episodes if (v := e.oldest_version) is not None), default=-1)


def _summary(path: Path, notes: list[str]) -> RunSummary | None:
    try:
        return read_summary(path)
    except (ValueError, TypeError) as error:  # a disk that was full at the end of the run leaves a part of it
        notes.append(f"The summary could not be read: {error}")
        return None


def _json(path: Path, notes: list[str]) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        notes.append(f"{path.name} could not be read: {error}")
        return {}
    return content if isinstance(content, dict) else {}
