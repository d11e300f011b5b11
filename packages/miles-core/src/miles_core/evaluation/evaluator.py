"""What the run asks of an evaluation, whoever makes it."""

from __future__ import annotations


class Evaluator:
    """Evaluates versions of the weights for the run; this one, for a run without evaluation, does nothing.

    Whatever goes wrong is a skipped point with its reason, never an error here. Only what keeps a point from being
    recorded (the ledger's disk is full) is raised.
    """

    async def begin(self, step: int) -> dict[str, float]:
        """Evaluate the weights of `step`, which trainer and engines hold; training goes on when this returns.

        Returns:
            metrics that are there already, for the row of `step`; later ones are logged when they come.
        """
        return {}

    async def drain(self) -> None:
        """Wait until every evaluation begun has its point."""

    async def rewind(self, step: int) -> None:
        """The run goes back to `step`: evaluations of later weights are cancelled, and their points dropped."""

    async def close(self) -> None:
        """Cancel what still runs, and stop what was started for it."""
