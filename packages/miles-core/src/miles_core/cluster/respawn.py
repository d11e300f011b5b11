"""Processes of a run that are started again when they die, and how often."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import ray
from miles_rollout.errors import first_line
from miles_tito.errors import MilesError
from ray.exceptions import RayActorError

from miles_core.errors import cause
from miles_core.parts import Note

logger = logging.getLogger(__name__)

MAX_DEATHS = 5
SPELL_S = 300.0
"""Deaths longer ago than this no longer count."""
BACKOFF_S = 0.5


class PartLostError(MilesError, RuntimeError):
    """A process of the run dies again and again."""


class Respawns:
    """Counts the deaths of one process."""

    def __init__(self, kind: str, name: str) -> None:
        self._kind = kind
        self._name = name
        self._deaths: list[float] = []

    async def after(self, why: str, note: Note) -> None:
        """Note one more death, and wait before the next start: longer, the more there were.

        Raises:
            PartLostError: there were too many.
        """
        now = asyncio.get_running_loop().time()
        self._deaths = [*(then for then in self._deaths if now - then < SPELL_S), now]
        logger.warning("%s %s is gone and is started again: %s", self._kind, self._name, why)
        note(self._kind, self._name, f"gone, started again: {why}")
        if len(self._deaths) > MAX_DEATHS:
            raise PartLostError(
                f"{self._kind} {self._name} died {len(self._deaths)} times within {SPELL_S:.0f} s; the last time: {why}"
            )
        await asyncio.sleep(BACKOFF_S * 2 ** (len(self._deaths) - 1))


async def ended(ref: Any) -> str:
    """Wait for a remote call that lasts as long as its part does; returns why it ended, in one line."""
    try:
        return await ref or "it was stopped"
    except RayActorError:
        return "its process died"
    except asyncio.CancelledError:
        ray.cancel(ref)
        raise
    except MilesError as error:
        return first_line(str(cause(error)))
