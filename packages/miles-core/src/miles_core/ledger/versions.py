"""Weight versions across rewinds, whose labels are used twice.

            c ─ c+1' ─ c+2' ─ …  ─ j'        the branch that survives
            │
            └── c+1 ── c+2 ── … ─ c+k        the dead branch: its labels were given out before

A version is an optimizer step. After a rewind to step `c` the labels above `c` are given again, to other weights. A
token that version `c+k` of the dead branch sampled is `k` steps from `c`, and version `j` of the new branch is `j - c`
steps from it: its distance is `k + (j - c)`, as if it came from version `c - k`. So the versions of what is kept are
mirrored at `c`; after several rewinds at the lowest, where the branches part.
"""

from __future__ import annotations

from collections.abc import Collection


def effective_version(version: int, rewinds: Collection[int]) -> int:
    """The version of one token as the surviving branch counts.

    Args:
        version: its label.
        rewinds: the steps that the run went back to since the token was sampled.
    """
    return min((version, *(2 * step - version for step in rewinds)))


def effective_versions(oldest: int, newest: int, rewinds: Collection[int]) -> tuple[int, int]:
    """The oldest and newest version of some tokens as the surviving branch counts."""
    if not rewinds:
        return oldest, newest
    lowest = min(rewinds)
    ends = effective_version(oldest, rewinds), effective_version(newest, rewinds)
    return min(ends), (lowest if oldest <= lowest <= newest else max(ends))
