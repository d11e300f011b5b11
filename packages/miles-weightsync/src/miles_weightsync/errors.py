"""The errors of weight sync: one root, children that are also the matching built-in error."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .report import EngineOutcome


class WeightSyncError(Exception):
    """Root of every error that this package raises on purpose."""


class PushConfigError(WeightSyncError, ValueError):
    """A push setting is out of range or contradicts another one."""


class ShardError(WeightSyncError, ValueError):
    """The shards of the trainer ranks do not describe whole tensors exactly once."""


class StagingError(WeightSyncError, RuntimeError):
    """Shared memory for the buckets cannot be had."""


class TransportError(WeightSyncError, RuntimeError):
    """Bytes could not be brought into a receiver's memory; names the region, the offset, the bytes and the cause."""


class RegionError(TransportError, ValueError):
    """A region, a range within one, or the data for it are not what the transport can use."""


class TransportTimeout(TransportError, TimeoutError):
    """Writes did not finish within the deadline of a wait."""


class MissingDependency(WeightSyncError, ImportError):
    """A transport needs a package that is not installed; says which to install."""


class EngineRequestError(WeightSyncError, RuntimeError):
    """An engine refused an update request, answered nonsense, or did not answer in time.

    Attributes:
        status: HTTP status of the answer, None where there was none.
    """

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class SyncError(WeightSyncError, RuntimeError):
    """A push failed. Engines that took a bucket stay paused until a later push of a complete version.

    Attributes:
        phase: the phase that failed first.
        engines: how the push ended on every engine; empty when it failed before reaching one.
    """

    def __init__(self, message: str, *, phase: str, engines: tuple[EngineOutcome, ...] = ()) -> None:
        super().__init__(message)
        self.phase = phase
        self.engines = engines

    def __reduce__(self) -> tuple[object, tuple[str, str, tuple[EngineOutcome, ...]]]:
        return _rebuild_sync_error, (str(self), self.phase, self.engines)


def _rebuild_sync_error(message: str, phase: str, engines: tuple[EngineOutcome, ...]) -> SyncError:
    return SyncError(message, phase=phase, engines=engines)
