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


class RequestSwallowed(EngineError):
    """An engine accepted a request and knows nothing of it: no answer will ever come."""


class WireError(RecordError):
    """Bytes on the wire or on disk are torn, foreign, or from a newer schema."""


class TokenizerError(MilesError, ValueError):
    """A tokenizer folder cannot be used; the message names the file."""


class TemplateError(MilesError, ValueError):
    """A chat template refuses a conversation, or cannot guarantee exact joins."""


class RequestError(MilesError, ValueError):
    """A chat request cannot be served as asked.

    Attributes:
        status: HTTP status to answer with.
        code: short machine-readable name of the problem.
        param: the request field at fault, or None.
    """

    def __init__(self, message: str, *, status: int = 400, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param


class SessionError(MilesError, RuntimeError):
    """A session server refused a call or did not answer.

    Attributes:
        status: HTTP status of the answer, or None when there was none.
        was_resent: an earlier sending of the same call may have been served.
    """

    def __init__(self, message: str, *, status: int | None = None, was_resent: bool = False) -> None:
        super().__init__(message)
        self.status = status
        self.was_resent = was_resent
