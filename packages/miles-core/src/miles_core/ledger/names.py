"""From what a user types to a prompt, a group, an episode or a sample; the beginning of an id is enough."""

from __future__ import annotations

import re
import sqlite3
from dataclasses import dataclass

from .errors import LedgerError

MOST = 5
"""Ids that a message lists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What an id stands for: a prompt, or a group and maybe one episode of it."""

    prompt_id: str | None = None
    number: int | None = None
    episode: int | None = None
    sample_id: str | None = None
    """The id as given, where it names a trajectory."""


def find(db: sqlite3.Connection, name: str) -> Found:
    """What `name` stands for: an id, or the beginning of exactly one prompt's or group's.

    Raises:
        LedgerError: nothing, or more than one thing.
    """
    name = name.encode(errors="replace").decode()  # bytes of a command line that are no text, no id has
    if db.execute("SELECT 1 FROM groups WHERE prompt_id = ? LIMIT 1", (name,)).fetchone():
        return Found(prompt_id=name)
    number = _group(db, name)
    if number is not None:
        return Found(number=number)
    return _inside_a_group(db, name) or _beginning_with(db, name)


def _group(db: sqlite3.Connection, name: str) -> int | None:
    row = db.execute("SELECT number FROM groups WHERE group_id = ?", (name,)).fetchone()
    return row[0] if row else None


def _inside_a_group(db: sqlite3.Connection, name: str) -> Found | None:
    """`g000012/3` is an episode, `g000012-3.0:1` a trajectory of its attempt 0."""
    for separator in re.finditer(r"[/-]", name):
        number = _group(db, name[: separator.start()])
        inner = re.match(r"[0-9]{1,9}(?![0-9])", name[separator.end() :])
        if number is None or inner is None:
            continue
        episode = int(inner[0])
        (known,) = db.execute("SELECT count(*) FROM episodes WHERE number = ?", (number,)).fetchone()
        if known and episode >= known:
            raise LedgerError(f"Group {name[: separator.start()]} has {known} episodes, 0 to {known - 1}.")
        is_sample = separator.end() + inner.end() < len(name)
        return Found(number=number, episode=episode, sample_id=name if is_sample else None)
    return None


def _beginning_with(db: sqlite3.Connection, name: str) -> Found:
    span = (name, name + "\U0010ffff")
    limit = f"LIMIT {MOST + 1}"
    groups = list(
        db.execute(f"SELECT group_id, number FROM groups WHERE group_id >= ? AND group_id < ? ORDER BY 1 {limit}", span)
    )
    prompts = [
        row[0]
        for row in db.execute(
            f"SELECT DISTINCT prompt_id FROM groups WHERE prompt_id >= ? AND prompt_id < ? ORDER BY 1 {limit}", span
        )
    ]
    found = [Found(number=number) for _, number in groups] + [Found(prompt_id=prompt) for prompt in prompts]
    if len(found) == 1 and name:
        return found[0]
    if not found:
        raise LedgerError(f"No prompt, group, episode or sample is called {name!r}, or begins so. {_examples(db)}")
    ids = [group_id for group_id, _ in groups] + prompts
    more = " and more" if len(ids) > MOST else ""
    raise LedgerError(f"{name!r} begins several ids: {', '.join(ids[:MOST])}{more}. Give more of it.")


def _examples(db: sqlite3.Connection) -> str:
    row = db.execute("SELECT min(group_id), max(group_id), min(prompt_id) FROM groups").fetchone()
    if row[0] is None:
        return "Nothing has been issued yet."
    return f"Groups go from {row[0]} to {row[1]}; a prompt is for example {row[2]}."
