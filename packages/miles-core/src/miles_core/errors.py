"""What lies behind an error that tasks and remote processes have wrapped."""

from __future__ import annotations


def cause(error: BaseException) -> BaseException:
    """The first error inside nested groups; what a remote process raised rather than Ray's wrapping of it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    remote = getattr(error, "cause", None)
    return remote if isinstance(remote, BaseException) else error
