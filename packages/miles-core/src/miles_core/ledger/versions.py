"""Weight versions across rewinds, whose labels are used twice.

            c ─ c+1' ─ c+2' ─ …  ─ j'        the branch that survives
            │
            └── c+1 ── c+2 ── … ─ c+k        the dead branch: its labels were given out before

A version is an optimizer step. After a rewind to step `c` the labels above `c` are given again, to other weights. A
token that version `c+k` of the dead branch sampled is `k` steps from `c`, and version `j` of the new branch is `j - c`
steps from it: its distance is `k + (j - c)`, as if it came from version `c - k`. So the versions of what is kept are
mirrored at `c`.
"""

from __future__ import annotations

from collections.abc import Iterable


def effective_version(version: int, rewinds: Iterable[int]) -> int:
    """The version of one token as the surviving branch counts, after each of `rewinds` (to which step) in turn."""
    for step in rewinds:
        version = min(version, 2 * step - version)
    return version


def effective_versions(oldest: int, newest: int, rewinds: Iterable[int]) -> tuple[int, int]:
    """The oldest and newest version of some tokens as the surviving branch counts.

    Exact for the oldest: it is the least `effective_version` of any token between the two. The newest is what a later
    rewind has to know: nothing is newer than the step that was rewound to.
    """
    for step in rewinds:
        oldest, newest = min(oldest, 2 * step - newest), min(newest, step)
    return oldest, newest
