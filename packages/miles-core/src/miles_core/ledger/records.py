"""What the ledger takes and gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from miles_core.durable.spool import SpoolAddress

from .versions import effective_versions


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits that a start runs under; `verify` holds its groups against them."""

    max_staleness: int | None = None
    """Versions that a trained token may be behind; None where a policy keeps older ones."""
    credits: int | None = None
    """Groups that may be open when another one is issued; None for no bound."""
    retries: int = 0
    """Further attempts that a worker makes of an episode by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenGroup:
    """A group without a final fate."""

    id: str
    number: int
    """Position in the order of issue, from 0."""
    prompt_id: str
    attempt: int
    """Number of the first attempt of its present issue, above all that were made before."""
    retry_of: str | None
    """The discarded group whose prompt this one runs again."""
    address: SpoolAddress | None
    """Where its record lies; None while it runs."""
    is_admitted: bool
    """The buffer holds it: filter and policies at `put` are behind it."""
    rewinds: tuple[int, ...]
    """Steps that the run went back to since it was issued: `effective_version` needs them for its tokens."""
    issued_version: int
    """Version of the engines at its issue, as the surviving branch counts."""
    oldest_version: int | None
    """Of its trained tokens, as the surviving branch counts; None while it runs, and where the engine named none."""
    newest_version: int | None

    def versions(self, oldest: int | None, newest: int | None) -> tuple[int, int] | None:
        """What recorded versions of some of its tokens are on the surviving branch; None where none were recorded."""
        if oldest is None or newest is None:
            return None
        return effective_versions(oldest, newest, self.rewinds)


class PendingRetry(NamedTuple):
    """A prompt that is to run again, and was not issued again yet."""

    retry_of: str
    """Id of the discarded group."""
    prompt_id: str
