"""`miles why`: what became of one prompt, group, episode or sample, in words; the beginning of an id is enough."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from miles_rollout.fates import Fate

from miles_core.text import format_time, visible

from .schema import LedgerError, reading

MAX_GROUPS = 20
"""Groups of one prompt that are listed, newest first."""
MAX_IDS = 5
"""Ids that a message lists."""

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


def why(path: Path, name: str) -> str:
    """The history of what `name` stands for in the ledger at `path`; the run may be going on.

    Args:
        name: an id, or the beginning of exactly one prompt's or group's.

    Raises:
        LedgerError: there is no such ledger, or nothing, or more than one thing, of that name in it.
    """
    name = name.encode(errors="replace").decode()  # bytes of a command line that are no text, no id has
    with reading(path) as db:
        if groups := _groups(db, "prompt_id = ? ORDER BY number DESC", name):
            return "\n".join(_prompt(db, groups))
        if groups := _groups(db, "group_id = ?", name):
            return "\n".join(_group(db, groups[0]))
        return "\n".join(_inside_a_group(db, name) or _beginning_with(db, name))


def _groups(db: sqlite3.Connection, condition: str, value: str) -> list[_Group]:
    columns = ", ".join(_Group._fields)
    rows = db.execute(f"SELECT {columns} FROM groups LEFT JOIN segments USING (segment) WHERE {condition}", (value,))
    return [_Group(*row) for row in rows]


def _inside_a_group(db: sqlite3.Connection, name: str) -> list[str]:
    """`g000012/3` is an episode, `g000012-3.0:1` a trajectory of its attempt 0; empty for anything else."""
    for separator in re.finditer(r"[/-]", name):
        groups = _groups(db, "group_id = ?", name[: separator.start()])
        inner = re.match(r"[0-9]{1,9}(?![0-9])", name[separator.end() :])
        if not groups or inner is None:
            continue
        group, episode = groups[0], int(inner[0])
        (known,) = db.execute("SELECT count(*) FROM episodes WHERE number = ?", (group.number,)).fetchone()
        if known and episode >= known:
            raise LedgerError(f"Group {group.group_id} has {known} episodes, 0 to {known - 1}.")
        head = f"Episode {group.group_id}/{episode} is one of the siblings of group {group.group_id}."
        if separator.end() + inner.end() < len(name):
            head = f"Sample {visible(name)} is a trajectory of episode {group.group_id}/{episode}."
        return [head, *_group(db, group, only=episode)]
    return []


def _beginning_with(db: sqlite3.Connection, name: str) -> Iterator[str]:
    found: list[str] = []
    for column in ("group_id", "prompt_id"):
        ids = f"SELECT DISTINCT {column} FROM groups WHERE {column} >= ? AND {column} < ? ORDER BY 1 LIMIT ?"
        found += [row[0] for row in db.execute(ids, (name, name + "\U0010ffff", MAX_IDS + 1))]
    if not found:
        first, last, prompt = db.execute("SELECT min(group_id), max(group_id), min(prompt_id) FROM groups").fetchone()
        known = f"Groups go from {first} to {last}; a prompt is for example {prompt}."
        raise LedgerError(
            f"No prompt, group, episode or sample is called {name!r}, or begins so. "
            + ("Nothing has been issued yet." if first is None else known)
        )
    if len(found) > 1 or not name:
        more = " and more" if len(found) > MAX_IDS else ""
        raise LedgerError(f"{name!r} begins several ids: {', '.join(found[:MAX_IDS])}{more}. Give more of it.")
    if groups := _groups(db, "group_id = ?", found[0]):
        return _group(db, groups[0])
    return _prompt(db, _groups(db, "prompt_id = ? ORDER BY number DESC", found[0]))


def _prompt(db: sqlite3.Connection, groups: list[_Group]) -> Iterator[str]:
    """Each group of a prompt in a line, newest first; the whole history where there is only one."""
    times = "once" if len(groups) == 1 else f"{len(groups)} times"
    yield f"Prompt {visible(groups[0].prompt_id)} was issued {times}."
    if len(groups) == 1:
        yield from _group(db, groups[0])
        return
    for group in groups[:MAX_GROUPS]:
        yield f"  {format_time(group.issued_at)}  {group.group_id} {_standing(db, group)}"
    if len(groups) > MAX_GROUPS:
        yield f"  … and {len(groups) - MAX_GROUPS} earlier ones"


def _group(db: sqlite3.Connection, group: _Group, *, only: int | None = None) -> Iterator[str]:
    """What happened to a group, and its episodes, or `only` one of them."""
    yield f"Group {group.group_id} of prompt {visible(group.prompt_id)} {_standing(db, group)}."
    for at, _, line in sorted(_moments(db, group), key=lambda moment: moment[:2]):
        yield f"  {format_time(at)}  {line}"
    yield from _episodes(db, group, only)


def _standing(db: sqlite3.Connection, group: _Group) -> str:
    """Where it stands, after its name."""
    match Fate(group.fate):
        case Fate.IN_FLIGHT if group.finished_at is None:
            return "runs, or waits to be run again by the next start"
        case Fate.IN_FLIGHT:
            return "has finished and is about to meet the filter"
        case Fate.BUFFERED:
            return "waits in the buffer"
        case Fate.TRAINED:
            live = "SELECT version, committed_at FROM steps JOIN step_groups USING (step) WHERE number = ? AND is_live"
            version, committed_at = db.execute(live, (group.number,)).fetchone() or (None, None)
            unsafe = ", which no checkpoint holds yet" if committed_at is None else ""
            return f"was trained in step {version}{unsafe}"
        case ending:
            return f"was {_ENDINGS[ending]}" + (f" ({visible(group.reason)})" if group.reason else "")


def _moments(db: sqlite3.Connection, group: _Group) -> Iterator[tuple[float, int, str]]:
    """What happened to a group, each with its time and its place among what has the same time."""
    for what, reason, version, at in db.execute(
        "SELECT what, reason, version, at FROM changes WHERE number = ? ORDER BY change", (group.number,)
    ):
        yield at, 0 if what in ("issued", "reissued") else 2, _change(what, visible(reason), version, group)
    if group.finished_at is not None:
        yield group.finished_at, 1, _finish(db, group)
    row = db.execute(
        "SELECT version, committed_at, (SELECT min(version || ' ' || checkpoint) FROM steps AS later WHERE "
        "later.committed_at = steps.committed_at AND checkpoint IS NOT NULL) FROM steps JOIN step_groups USING (step) "
        "WHERE number = ? AND is_live AND committed_at IS NOT NULL",
        (group.number,),
    ).fetchone()
    if row:
        checkpoint = f" by checkpoint {row[2].split(' ', 1)[1]}" if row[2] else ""
        yield row[1], 3, f"step {row[0]} is committed{checkpoint}: no crash can undo it"
    for again in _groups(db, "retry_of = ?", group.group_id)[:1]:
        yield again.issued_at, 4, f"its prompt runs again as {again.group_id}"


def _change(what: str, reason: str, version: int, group: _Group) -> str:
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
            because = f": {reason}" if reason else ""
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
        "loss_tokens, oldest_version, newest_version, is_masked FROM episodes "
        "WHERE number = ? AND coalesce(episode = ?, true) ORDER BY episode",
        (group.number, only),
    )
    for index, name, outcome, reward, error, attempt, seconds, at, trajectories, tokens, loss, old, new, masked in rows:
        result = f"reward {reward:g}" if reward is not None else _first_line(error) or "no reward"
        shape = f", {tokens} tokens ({loss} trained) in {trajectories} trajectories" if trajectories else ""
        mask = "; too old, so only its reward counted" if masked else ""
        yield f"  {name}  {outcome}, {result}{shape}{_versions(old, new)}{mask}"
        for number, ending, why_not, took, when in db.execute(
            "SELECT attempt, outcome, error, seconds, finished_at FROM attempts WHERE number = ? AND episode = ? "
            "ORDER BY attempt",
            (group.number, index),
        ):
            ended = f"took {took:.1f} s until {format_time(when)}"
            yield f"      attempt {number} {ended}: {ending}, {_first_line(why_not)}"
        yield f"      attempt {attempt} took {seconds:.1f} s{f', ended {format_time(at)}' if at else ''}"


def _versions(oldest: int | None, newest: int | None) -> str:
    if oldest is None or oldest < 0:
        return ""
    return f", sampled by version {oldest}" if oldest == newest else f", sampled by versions {oldest} to {newest}"


def _first_line(error: str | None) -> str:
    lines = (error or "").strip().splitlines()
    return visible(lines[0]) if lines else ""
