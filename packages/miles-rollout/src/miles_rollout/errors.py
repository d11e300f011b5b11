"""What can go wrong while groups are scheduled, advantages assigned and prompts read."""

from __future__ import annotations

from miles_tito import MilesError
from miles_tito.shared.settings import SettingError

RolloutConfigError = SettingError
"""An older name."""


class PromptError(MilesError, ValueError):
    """The prompts cannot be streamed as asked, or a saved position does not fit them."""


class PromptsExhausted(MilesError, RuntimeError):
    """An iterator of prompts ended."""


class AdvantageError(MilesError, ValueError):
    """Rewards or advantages break the contract of an advantage function."""


class BufferStateError(MilesError, RuntimeError):
    """A group is unknown to the buffer, or not in the state that the call needs."""


class BufferClosedError(MilesError, RuntimeError):
    """The buffer was closed, or no further group can come."""


class EmptyBatchesError(MilesError, RuntimeError):
    """Whole batches' worth of groups in a row were discarded."""


class FailureBudgetError(MilesError, RuntimeError):
    """More episodes failed than the failure budget allows."""


def first_line(error: str | None) -> str:
    """The first line of an error text, for counting and for one-line reports."""
    lines = (error or "").strip().splitlines()
    return lines[0] if lines else "no error text"
