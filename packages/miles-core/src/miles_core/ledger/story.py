"""What became of one prompt, group, episode or sample, in words: `miles why`."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from miles_rollout.fates import Fate

from miles_core.text import visible

from .names import Found, find
from .schema import reading

MOST_GROUPS = 20
"""Groups of one prompt that are listed, newest first."""

_ENDINGS = {
    Fate.FILTERED: "discarded by the filter",
    Fate.STALE: "discarded for its age",
    Fate.FAILED: "discarded for its failed episodes",
    Fate.ABORTED: "aborted",
}


class _Group(NamedTuple):
    number: int
    group_id: str
    prompt_id: str
    fate: str
    reason: str
    issued_at: float
    retry_of: str | None
    is_retry_due: int
    finished_at: float | None
    file: str | None
    offset: int | None


_GROUPS = (
    "SELECT number, group_id, prompt_id, fate, reason, issued_at, retry_of, is_retry_due, finished_at, file, offset "
    "FROM groups LEFT JOIN segments USING (segment)"
)


def why(path: Path, name: str) -> str:
    """The story of what `name` stands for in the ledger at `path`; the run may be going on.

    Raises:
        LedgerError: there is no such ledger, or no such thing in it.
    """
    with reading(path) as db:
        found = find(db, name)
        return "\n".join(_prompt(db, found.prompt_id) if found.prompt_id is not None else _about(db, found))


def _prompt(db: sqlite3.Connection, prompt_id: str) -> Iterator[str]:
    """Each group of a prompt in a line; the whole story where there is only one."""
    groups = [_Group(*row) for row in db.execute(f"{_GROUPS} WHERE prompt_id = ? ORDER BY number DESC", (prompt_id,))]
    times = "once" if len(groups) == 1 else f"{len(groups)} times"
    yield f"Prompt {visible(prompt_id)} was issued {times}."
    if len(groups) == 1:
        yield from _group(db, groups[0], episode=None)
        return
    for group in groups[:MOST_GROUPS]:
        yield f"  {_time(group.issued_at)}  {group.group_id} {_standing(db, group)}"
    if len(groups) > MOST_GROUPS:
        yield f"  … and {len(groups) - MOST_GROUPS} earlier ones"


def _about(db: sqlite3.Connection, found: Found) -> Iterator[str]:
    group = _Group(*db.execute(f"{_GROUPS} WHERE number = ?", (found.number,)).fetchone())
    if found.sample_id is not None:
        yield f"Sample {visible(found.sample_id)} is a trajectory of episode {group.group_id}/{found.episode}."
    elif found.episode is not None:
        yield f"Episode {group.group_id}/{found.episode} is one of the siblings of group {group.group_id}."
    yield from _group(db, group, episode=found.episode)


def _group(db: sqlite3.Connection, group: _Group, *, episode: int | None) -> Iterator[str]:
    yield f"Group {group.group_id} of prompt {visible(group.prompt_id)} {_standing(db, group)}."
    for at, line in sorted(_moments(db, group), key=lambda moment: moment[0]):  # stable: equal times keep their order
        yield f"  {_time(at)}  {line}"
    yield from _episodes(db, group, episode)


def _standing(db: sqlite3.Connection, group: _Group) -> str:
    """Where it stands, after its name."""
    reason = f" ({visible(group.reason)})" if group.reason else ""
    match Fate(group.fate):
        case Fate.IN_FLIGHT if group.finished_at is None:
            return "runs, or waits to be run again by the next start"
        case Fate.IN_FLIGHT:
            return "has finished and is about to meet the filter"
        case Fate.BUFFERED:
            return "waits in the buffer"
        case Fate.TRAINED:
            version, committed_at = db.execute(
                "SELECT version, committed_at FROM steps JOIN step_groups USING (step) WHERE number = ? AND is_live",
                (group.number,),
            ).fetchone() or (None, None)
            if committed_at is None:
                return f"was trained in step {version}, which no checkpoint holds yet"
            return f"was trained in step {version}"
        case ending:
            return f"was {_ENDINGS[ending]}{reason}"


def _moments(db: sqlite3.Connection, group: _Group) -> Iterator[tuple[float, str]]:
    """What happened to a group, each with its time."""
    last = group.issued_at
    for what, reason, version, at in db.execute(
        "SELECT what, reason, version, at FROM changes WHERE number = ? ORDER BY change", (group.number,)
    ):
        if group.finished_at is not None and last <= group.finished_at <= at and what not in ("issued", "reissued"):
            yield group.finished_at, _finish(db, group)
            last = at + 1e9  # told once
        yield at, _change(what, visible(reason), version, group)
    if group.finished_at is not None and last <= group.finished_at:
        yield group.finished_at, _finish(db, group)
    row = db.execute(
        "SELECT version, committed_at, (SELECT min(version || ' ' || checkpoint) FROM steps AS later WHERE "
        "later.committed_at = steps.committed_at AND checkpoint IS NOT NULL) FROM steps JOIN step_groups USING (step) "
        "WHERE number = ? AND is_live AND committed_at IS NOT NULL",
        (group.number,),
    ).fetchone()
    if row:
        checkpoint = f" by checkpoint {row[2].split(' ', 1)[1]}" if row[2] else ""
        yield row[1], f"step {row[0]} is committed{checkpoint}: no crash can undo it"
    again = db.execute("SELECT group_id, issued_at FROM groups WHERE retry_of = ?", (group.group_id,)).fetchone()
    if again:
        yield again[1], f"its prompt runs again as {again[0]}"


def _change(what: str, reason: str, version: int, group: _Group) -> str:
    because = f": {reason}" if reason else ""
    match what:
        case "issued":
            retry = f", because {group.retry_of} was discarded" if group.retry_of else ""
            return f"issued while the engines held version {version}{retry}"
        case "reissued":
            return f"the run went on from step {version} and issued it again: it had not finished"
        case "returned":
            return f"the run went {reason} and dropped the step that had trained it: it waits in the buffer again"
        case Fate.BUFFERED:
            return f"admitted to the buffer at version {version}"
        case Fate.TRAINED:
            return f"trained: the engines hold version {version}, which contains it"
        case _:
            again = "; its prompt is to run again" if group.is_retry_due else ""
            return f"{_ENDINGS[Fate(what)]} at version {version}{because}{again}"


def _finish(db: sqlite3.Connection, group: _Group) -> str:
    episodes, rewarded, oldest, newest = db.execute(
        "SELECT count(*), count(reward), min(oldest_version), max(newest_version) FROM episodes WHERE number = ?",
        (group.number,),
    ).fetchone()
    place = f", on disk in trajectories/{group.file} at byte {group.offset}" if group.file else ""
    return f"finished: {rewarded} of {episodes} episodes have a reward{_versions(oldest, newest)}{place}"


def _episodes(db: sqlite3.Connection, group: _Group, only: int | None) -> Iterator[str]:
    rows = db.execute(
        "SELECT episode, episode_id, outcome, reward, error, attempt, seconds, finished_at, trajectories, tokens, "
        "loss_tokens, oldest_version, newest_version, is_masked FROM episodes WHERE number = ? ORDER BY episode",
        (group.number,),
    )
    for index, name, outcome, reward, error, attempt, seconds, at, trajectories, tokens, loss, old, new, masked in rows:
        if only is not None and index != only:
            continue
        result = f"reward {reward:g}" if reward is not None else _first_line(error) or "no reward"
        shape = f", {tokens} tokens ({loss} trained) in {trajectories} trajectories" if trajectories else ""
        ended = f", ended {_time(at)}" if at else ""
        mask = "; too old, so only its reward counted" if masked else ""
        yield f"  {name}  {outcome}, {result}{shape}{_versions(old, new)}{mask}"
        for number, ending, why_not, took, when in db.execute(
            "SELECT attempt, outcome, error, seconds, finished_at FROM attempts WHERE number = ? AND episode = ? "
            "ORDER BY attempt",
            (group.number, index),
        ):
            yield f"      attempt {number} took {took:.1f} s until {_time(when)}: {ending}, {_first_line(why_not)}"
        yield f"      attempt {attempt} took {seconds:.1f} s{ended}"


def _versions(oldest: int | None, newest: int | None) -> str:
    if oldest is None or oldest < 0:
        return ""
    return f", sampled by version {oldest}" if oldest == newest else f", sampled by versions {oldest} to {newest}"


def _first_line(error: str | None) -> str:
    lines = (error or "").strip().splitlines()
    return visible(lines[0]) if lines else ""


def _time(at: float) -> str:
    return datetime.fromtimestamp(at).strftime("%Y-%m-%d %H:%M:%S")
