"""One engine's way through a push: its requests one after another, on a thread of its own.

```
 idle ──open──▶ paused, session open ──load *──▶ ──commit──▶ verified, stamped, generating
                     │                    │           │
                     └────────────────────┴───────────┴──▶ failed: paused, later steps are skipped
```
A slow or dead engine never holds up another one past its own deadline.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Literal

from .engine import Deadline, EngineClient, EngineFacts
from .errors import EngineRequestError, WeightSyncError
from .report import EngineOutcome

if TYPE_CHECKING:
    from collections.abc import Generator

    from .checksum import Comparison, ExpectedChecksums
    from .config import Pause

_HOLD_S = 5.0
"""How long to try to pause an engine whose first requests failed."""


class Lane:
    """The steps of one push on one engine, queued by the leader and run in order."""

    def __init__(self, url: str, *, pause: Pause, timeout_s: float, api_key: str | None) -> None:
        self.url = url
        self.facts: EngineFacts | None = None
        self._client = EngineClient(url, api_key=api_key)
        self._pause: Pause = pause
        self._deadline = Deadline(timeout_s)
        self._futures: list[Future[None]] = []
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"push {url}")
        self._seconds: dict[str, float] = {}
        self._failure: tuple[str, str] | None = None
        self._written = self._flushed = self._unreached = False
        self._comparison: Comparison | None = None
        self._paused_at: float | None = None
        self._pause_seconds = 0.0

    @property
    def failed(self) -> bool:
        return self._failure is not None

    def probe(self) -> Future[None]:
        """Read how the engine was started."""

        def run() -> None:
            self.facts = self._client.facts(self._deadline)

        return self._submit("probe", run)

    def open(self, *, session: bool) -> Future[None]:
        """Pause, drop the prefix cache, and open an update session if this way of updating has one."""

        def run() -> None:
            self._paused_at = time.monotonic()
            self._client.pause(self._pause, self._deadline)
            self._flush()
            if session:
                self._client.begin(self._deadline)

        return self._submit("pause", run)

    def load(self, payload_R: list[str]) -> Future[None]:
        """Load one staged bucket."""

        def run() -> None:
            self._written = True
            self._client.load_tensors(payload_R, self._deadline)

        return self._submit("load", run)

    def load_disk(self, path: str) -> Future[None]:
        """Load a checkpoint folder."""

        def run() -> None:
            self._written = True
            self._client.load_disk(path, self._deadline)

        return self._submit("load", run)

    def end(self) -> Future[None]:
        """Close the update session."""
        return self._submit("load", lambda: self._client.end(self._deadline))

    def verify(self, expected: Callable[[], ExpectedChecksums], *, trusted: frozenset[str]) -> Future[None]:
        """Compare the engine's checksums with the trainer's."""

        def run() -> None:
            reported_R = self._client.checksums(self._deadline)
            self._comparison = expected().compare(reported_R, trusted=trusted)
            if self._comparison.problems:
                raise EngineRequestError("checksums: " + "; ".join(self._comparison.problems) + self._dtype_hint())

        return self._submit("verify", run)

    def resume(self, version: int) -> Future[None]:
        """Stamp the version and generate again."""

        def run() -> None:
            self._client.stamp(version, self._deadline)
            self._client.resume(self._deadline)
            self._stop_clock()

        return self._submit("resume", run)

    def cancel(self, phase: str, reason: str) -> None:
        """Fail from outside: what is queued is skipped, what runs ends by its own deadline."""
        self._failure = self._failure or (phase, reason)

    def finish(self) -> EngineOutcome:
        """Wait for the queue, close the connection, and say how it went."""
        self._thread.shutdown(wait=True)
        for future in self._futures:
            future.result()  # raises nothing that a step raised: that is in the outcome
        if self._failure is not None:
            if self._unreached:
                self._hold()
            self._stop_clock()
        self._client.close()
        phase, error = self._failure or (None, None)
        return EngineOutcome(
            url=self.url,
            ok=self._failure is None,
            phase=phase,
            error=error,
            written=self._written,
            cache_flushed=self._flushed,
            verified=self._verified(),
            num_verified=self._comparison.num_equal if self._comparison is not None else 0,
            seconds=dict(self._seconds),
            pause_seconds=self._pause_seconds,
        )

    @property
    def comparison(self) -> Comparison | None:
        return self._comparison

    def _submit(self, phase: str, run: Callable[[], None]) -> Future[None]:
        def guarded() -> None:
            if self._failure is not None:
                return
            with self._timed(phase):
                try:
                    run()
                except Exception as error:  # also a mistake of ours: an engine that was not verified must not resume
                    self._unreached = phase in ("probe", "pause")
                    known = isinstance(error, WeightSyncError)
                    self._failure = self._failure or (
                        phase,
                        str(error) if known else f"{type(error).__name__}: {error}",
                    )

        future = self._thread.submit(guarded)
        self._futures.append(future)
        return future

    @contextmanager
    def _timed(self, phase: str) -> Generator[None]:
        start = time.monotonic()
        try:
            yield
        finally:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + time.monotonic() - start

    def _flush(self) -> None:
        if self._pause != "in_place":
            self._client.flush_cache(self._deadline, wait=True)
            self._flushed = True
            return
        # Running requests keep their KV by design. Without any, the prefixes of the old weights can and must go.
        with suppress(EngineRequestError):
            self._client.flush_cache(self._deadline, wait=False)
            self._flushed = True

    def _hold(self) -> None:
        """An engine that could not be reached at first must not go on generating with old weights unnoticed."""
        with suppress(EngineRequestError):
            self._client.pause(self._pause, Deadline(_HOLD_S))

    def _stop_clock(self) -> None:
        if self._paused_at is not None:
            self._pause_seconds += time.monotonic() - self._paused_at
            self._paused_at = None

    def _verified(self) -> Literal["all", "part", "none"]:
        if self._comparison is None or self._comparison.num_equal == 0:
            return "none"
        return "part" if self._comparison.num_unknown else "all"

    def _dtype_hint(self) -> str:
        if self._comparison is None or self._comparison.num_equal or (self.facts is not None and self.facts.dtype):
            return ""
        return (
            ". Every parameter differs and the engine does not say its element type: start it with an explicit "
            "`--dtype`, or set `dtype` of the push to what it holds"
        )
