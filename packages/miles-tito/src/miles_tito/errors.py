"""The errors of Miles: one root, children that are also the matching built-in error."""

from __future__ import annotations


class MilesError(Exception):
    """Root of every error that a Miles package raises on purpose."""


class RecordError(MilesError, ValueError):
    """A record was built from fields that contradict one another."""


class SampleError(RecordError):
    """A training sample cannot be built from what was recorded."""


class MissingDependency(MilesError, ImportError):
    """An optional dependency is absent; the message is the command that installs it."""


class EngineError(MilesError, RuntimeError):
    """The inference engine refused a request or did not answer.

    Attributes:
        status: HTTP status of the answer, or None when there was none.
        retryable: whether the same request id may be sent again.
    """

    def __init__(self, message: str, *, status: int | None = None, retryable: bool = False) -> None:
        super().__init__(message)
        self.status = status
        self.retryable = retryable
