"""Whether a run may go on although something that it depends on has changed."""

from __future__ import annotations

import logging

from miles_tito.errors import MilesError

from miles_core.durable.fingerprint import Changes

logger = logging.getLogger(__name__)


class ResumeError(MilesError, ValueError):
    """The run cannot go on as asked."""


def refuse(changes: Changes, *, accept_changes: bool) -> None:
    """Log what a run goes on with although it changed, or raise ResumeError."""
    if changes.refused and not accept_changes:
        raise ResumeError(
            "The run depends on what has changed since it was started:\n"
            + "\n".join(f"- {sentence}" for sentence in changes.refused)
            + "\nUndo that, or say --accept-changes to go on with it."
        )
    for sentence in changes.refused:
        logger.warning("accepted: %s", sentence)
