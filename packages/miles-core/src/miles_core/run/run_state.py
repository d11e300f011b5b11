"""What the starts of one RL run leave behind for the next: ledger, checkpoints, and what they were made from."""

from __future__ import annotations

import logging

from miles_core.actors.rollout_worker import MAX_LOSSES
from miles_core.cluster import TrainerRanks
from miles_core.config import Config
from miles_core.durable.checkpoints import Checkpoint, Checkpoints
from miles_core.durable.ledger import Ledger, Limits
from miles_core.durable.rundir import RunDir, environment

from .changes import ResumeError
from .commits import Commits

logger = logging.getLogger(__name__)


class RunState:
    """The past of an RL run in its directory. `RLRun` begins, commits and goes back with it."""

    def __init__(self, config: Config, *, run_dir: RunDir, accept_changes: bool) -> None:
        """
        Args:
            accept_changes: go on although the model or the data is another than before.
        """
        self._config = config
        self._run_dir = run_dir
        self._accept_changes = accept_changes
        self._checkpoints = Checkpoints(
            run_dir.checkpoints, keep=config.checkpoint.keep, keep_every=config.checkpoint.keep_every
        )
        self.ledger = Ledger.open(run_dir.ledger, create=True)
        self.commits = Commits(
            config.checkpoint, checkpoints=self._checkpoints, ledger=self.ledger, accept_changes=accept_changes
        )

    def begin(self) -> None:
        """A new start in the ledger: of a new run, or from the newest committed step of an old one."""
        rollout = self._config.rollout
        self._checkpoints.clean()
        found = self._checkpoints.latest()
        step = found.step if found else 0
        self._check_commits(step)
        recovered = self.ledger.recover_spooled(self._run_dir.trajectories)
        start = self.ledger.start(
            None if self.ledger.is_new else step,
            limits=Limits(
                max_staleness=None if rollout.trains_stale_groups else rollout.max_staleness,
                credits=rollout.num_credits,
                retries=MAX_LOSSES * (rollout.retries + 1) - 1,
            ),
            info=environment(),
        )
        if start:
            logger.info("start %d goes on from step %d; %d groups were on disk alone", start, step, recovered)

    async def load(self, trainers: TrainerRanks) -> Checkpoint | None:
        """The trainer to the newest checkpoint, which is returned; without one it stays at step 0."""
        found = self._checkpoints.latest()
        if found:
            await self.commits.load(found.path, trainers)
        return found

    def rewind(self, step: int, *, in_place: bool) -> None:
        """The ledger to `step`, where the trainer is.

        Args:
            in_place: this process trained before; the ledger of a new one is there since `begin`.
        """
        returned = self.ledger.rewind(step) if in_place else 0
        self.commits.last = step
        if returned:
            logger.info("back at step %d: %d groups trained after it return to the buffer", step, returned)

    async def commit(self, trainers: TrainerRanks, step: int) -> dict[str, float]:
        """Begin a checkpoint of `step`; returns metrics once training may go on."""
        state = {
            "version": step,
            "drawn": self.ledger.drawn(),
            "next_group": self.ledger.next_group(),
            "open_groups": [group.id for group in self.ledger.open_groups()],
        }
        return await self.commits.begin(step, trainers=trainers, state=state)

    def _check_commits(self, step: int) -> None:
        """What the ledger calls committed must be there: going on from less would undo it without a word."""
        if step >= (committed := self.ledger.last_commit()):
            return
        lost = (
            f"Step {committed} is committed, but the newest complete checkpoint in {self._run_dir.checkpoints} is of "
            f"step {step}: {committed - step} committed steps would be undone."
        )
        if not self._accept_changes:
            raise ResumeError(
                f"{lost} Bring the missing checkpoint back, or say --accept-changes to train those steps again."
            )
        logger.warning("accepted: %s", lost)
