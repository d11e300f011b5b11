"""When the run becomes durable: a checkpoint begins behind a step, is written while training goes on, and then commits.

step c ─▶ begin (copy, seconds at most) ─▶ step c+1 … ─▶ written ─▶ COMPLETE ─▶ ledger.commit(c)
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from miles_core.cluster import TrainerRanks
from miles_core.config import CheckpointConfig
from miles_core.durable.checkpoints import Checkpoint, Checkpoints, reading
from miles_core.durable.fingerprint import compare, fingerprint_model
from miles_core.durable.ledger import Ledger

from .changes import refuse

logger = logging.getLogger(__name__)

TRAINER = "trainer"
"""Folder inside a checkpoint that the trainer's ranks write."""


class Commits:
    """Decides when a step is saved, and saves it beside training, one at a time; the loop calls it after each step."""

    def __init__(
        self,
        config: CheckpointConfig,
        *,
        checkpoints: Checkpoints,
        ledger: Ledger | None = None,
        accept_changes: bool = False,
    ) -> None:
        """
        Args:
            ledger: records each committed step; supervised training keeps none.
            accept_changes: go on although the model or the data is another than before.
        """
        self._config = config
        self._checkpoints = checkpoints
        self._ledger = ledger
        self._accept_changes = accept_changes
        self._fingerprint: dict[str, Any] = {}
        self._writing: asyncio.Task[None] | None = None
        self._step = 0
        """Of the checkpoint that is being written."""
        self.last = 0
        """Newest committed step."""

    def check_unchanged(self, found: Checkpoint | None, *, model: Path, prompts: Mapping[str, Any]) -> None:
        """Model and data are those that the newest checkpoint was made with; later ones record them.

        Args:
            prompts: fingerprint of the data.

        Raises:
            ResumeError: they are not, and the user has not accepted that.
        """
        self._fingerprint = {"model": fingerprint_model(model), "prompts": prompts}
        if found is not None:
            before = self._checkpoints.load_state(found)["fingerprint"]
            refuse(compare(before, self._fingerprint), accept_changes=self._accept_changes)

    def is_due(self, step: int, *, is_last: bool) -> bool:
        """Whether to save after `step`: every so many, at the end of the run, or at the user's request."""
        every = self._config.every
        is_scheduled = every > 0 and step % every == 0
        return self._checkpoints.take_request() or is_scheduled or (is_last and self._config.at_end)

    async def begin(self, step: int, *, trainers: TrainerRanks, state: Mapping[str, Any]) -> dict[str, float]:
        """Start a checkpoint of `step`; returns metrics once training may go on.

        Raises:
            CheckpointError: there is no room for it, or the one before could not be written.
        """
        began = time.monotonic()
        await self.drain()
        waited = time.monotonic()
        self._step = step
        folder = self._checkpoints.begin(step)
        await trainers.begin_save(folder / TRAINER)
        self._writing = asyncio.create_task(
            self._finish(step, trainers, {**state, "fingerprint": self._fingerprint}), name=f"checkpoint {step}"
        )
        return {"time/checkpoint": time.monotonic() - waited, "time/checkpoint_wait": waited - began}

    async def check(self) -> None:
        """Raise what kept a checkpoint from the disk, as soon as that is known."""
        if self._writing is not None and self._writing.done():
            await self.drain()

    async def drain(self) -> None:
        """Wait for the checkpoint that is being written; raises what kept it from the disk."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            await writing

    async def give_up(self) -> None:
        """Abandon the checkpoint that is being written: the ranks that wrote it are gone, or the run ends."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.cancel()
            await asyncio.wait([writing])
            self._checkpoints.abandon(self._step)  # also of a task that was cancelled before it began
            if not writing.cancelled() and (error := writing.exception()) is not None:
                logger.warning("the last checkpoint was not completed: %s", error)

    async def load(self, path: Path, trainers: TrainerRanks) -> None:
        with reading(path):
            await trainers.load(path / TRAINER)

    async def _finish(self, step: int, trainers: TrainerRanks, state: dict[str, Any]) -> None:
        try:
            await trainers.finish_save()
            if self._ledger is not None:
                self._ledger.sync()  # what the checkpoint was trained on is on the device before the checkpoint counts
            path = await self._complete(step, state)
        except BaseException:
            self._checkpoints.abandon(step)
            raise
        if self._ledger is not None:
            self._ledger.commit(step, path.name)
        self.last = step
        logger.info("step %d is committed: %s", step, path)

    async def _complete(self, step: int, state: Mapping[str, Any]) -> Path:
        """Once begun it comes to its end, whoever cancels this: a thread that is left alone would complete a checkpoint
        after the run has looked for the newest one, of a branch that is dead by then."""
        completing = asyncio.ensure_future(asyncio.to_thread(self._checkpoints.complete, step, state))
        try:
            return await asyncio.shield(completing)
        except asyncio.CancelledError:
            await asyncio.wait([completing])
            return completing.result()
