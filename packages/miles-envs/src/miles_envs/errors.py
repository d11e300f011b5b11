"""The errors of an environment: a wrong definition, broken infrastructure, a limit of the policy, a failed grader."""

from __future__ import annotations

from miles_tito.errors import MilesError


class EnvironmentSetupError(MilesError, ValueError):
    """An environment, tool or reward is defined in a way that cannot work."""


class DataError(MilesError, ValueError):
    """A row of data is no prompt; the message names file and line."""


class InfraError(MilesError, RuntimeError):
    """Something that the policy cannot cause broke: the episode ends as `INFRA_ABORT`.

    Attributes:
        status: HTTP status of the answer, or None when there was none.
    """

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class EndpointError(MilesError, RuntimeError):
    """An endpoint of an `EndpointPool` answered, but not as one that is well; raise it for a status such as 503."""


class ContextExceeded(MilesError, RuntimeError):
    """The conversation is longer than the model's context: the policy's limit, graded as it stands."""


class EpisodeCancelled(MilesError, RuntimeError):
    """The run cancelled the episode; it ends as `CANCELLED`."""


class DeadlineReached(MilesError, RuntimeError):
    """The episode's time is over: the policy's limit, graded as it stands."""


class VerifierError(MilesError, RuntimeError):
    """No reward could be computed: the episode ends as `VERIFIER_INVALID`, never with a reward of 0."""


class GraderTimeout(VerifierError):
    """The grader took longer than it may."""


class GraderCrash(VerifierError):
    """The grader's process died."""
