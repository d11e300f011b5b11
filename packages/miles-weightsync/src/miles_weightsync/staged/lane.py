"""One engine's way through a staged push, on a thread of its own.

```
 prepare ─▶ write ─▶ verify ─▶ pause ─▶ begin ─▶ commit ─▶ finalize ─▶ end ─▶ stamp ─▶ resume     SERVE
    │         │         │        │        │         │          │         │       │        │
    └─────────┴─────────┴────────┴────────┴──undo───┘          └─────────┴───────┴────────┴─▶ the new version is whole;
                 the old version is served, whole                                      paused until the next push
```
Generation continues only when every rank has said that it holds one and the same version.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ..engine import Deadline, EngineClient
from ..errors import EngineRequestError, SyncError, WeightSyncError
from ..report import EngineOutcome
from .link import Link
from .sender import Senders
from .tables import EnginePlan

if TYPE_CHECKING:
    from ..config import Pause

_PUT_BACK_S = 15.0
"""How long to try to bring an engine back to its old version once its push has failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What one engine is to get."""

    version: int
    content: str
    plan: EnginePlan
    base: str | None
    """Content that the delta starts from; None for a full push."""
    sizes_R: tuple[tuple[int, ...], ...] | None
    """For each rank R of the engine, bytes of each bucket of the delta."""
    reason: str | None
    """Why it is a full push."""
    transport: str

    @property
    def kind(self) -> Literal["full", "delta"]:
        return "full" if self.base is None else "delta"


class StagedLane:
    """The steps of one push on one engine."""

    def __init__(
        self, index: int, client: EngineClient, link: Link, job: Job, *, pause: Pause, deadline: Deadline
    ) -> None:
        self._index, self._client, self._link, self._job = index, client, link, job
        self._pause: Pause = pause
        self._deadline = deadline
        self._phase = "prepare"
        self._seconds: dict[str, float] = {}
        self._bytes = 0
        self._flushed = False
        self._paused_at: float | None = None
        self._pause_seconds = 0.0
        self._committed = False

    def run(self, senders: Senders) -> EngineOutcome:
        """Go all the way, or say where it ended."""
        error: str | None = None
        try:
            self._timed("prepare", self._prepare)
            self._timed("write", lambda: self._write(senders))
            self._timed("verify", self._verify)
            self._timed("pause", self._stop)
            self._timed("load", self._commit)
            self._timed("resume", self._serve)
        except WeightSyncError as problem:
            error = str(problem)
            senders.cancel(self._index)
            self._put_back()
        except BaseException:  # a mistake of ours: even so, the engine must not stay paused
            senders.cancel(self._index)
            self._put_back()
            raise
        phase = self._phase if error is not None else None
        if self._paused_at is not None:
            self._pause_seconds = time.monotonic() - self._paused_at
        return EngineOutcome(
            url=self._client.url,
            ok=error is None,
            phase=phase,
            error=error,
            written=not self._link.is_whole,
            cache_flushed=self._flushed,
            verified="all" if error is None else "none",
            num_verified=sum(len(names) for names in self._job.plan.names_R) if error is None else 0,
            seconds=dict(self._seconds),
            pause_seconds=self._pause_seconds,
            kind=self._job.kind,
            reason=self._job.reason,
            bytes=self._bytes,
            serves=self._link.version,
        )

    def _prepare(self) -> None:
        job = self._job
        if self._link.known_plan != job.plan.id:
            tables = [{"op": "table", "table": table.to_json()} for table in job.plan.tables_R]
            self._link.ask(tables, self._deadline)
            self._link.known_plan = job.plan.id
        self._epoch = self._link.epoch + 1
        common = {"op": "prepare", "epoch": self._epoch, "version": job.version, "content": job.content}
        common |= {"base": job.base, "transport": job.transport}
        orders = [
            {**common, "plan": job.plan.id, "sizes": None if job.sizes_R is None else list(job.sizes_R[rank])}
            for rank in range(len(job.plan.tables_R))
        ]
        self._regions = [str(answer["region"]) for answer in self._link.ask(orders, self._deadline)]

    def _write(self, senders: Senders) -> None:
        job = self._job
        starts = None if job.sizes_R is None else [_starts(sizes) for sizes in job.sizes_R]
        senders.order(self._index, job.plan, self._regions, starts, job.base, self._deadline.left())
        self._written = senders.collect(self._index, job.plan, timeout_s=self._deadline.left())
        self._bytes = sum(int(said["bytes"]) for said in self._written)

    def _verify(self) -> None:
        digests: list[dict[int, tuple[str, str]]] = [{} for _ in self._job.plan.tables_R]
        lengths: list[dict[int, list[int]]] = [{} for _ in self._job.plan.tables_R]
        for said in self._written:
            for dst, index, sent, content, sizes in said["digests"]:
                digests[dst][index] = (sent, content)
                lengths[dst][index] = sizes or []
        is_delta = self._job.base is not None
        orders = [
            {
                "op": "verify",
                "epoch": self._epoch,
                "digests": [of[index] for index in sorted(of)],
                "lengths": [lengths[rank][index] for index in sorted(of)] if is_delta else None,
                "timeout_s": self._deadline.left(),
            }
            for rank, of in enumerate(digests)
        ]
        self._link.ask(orders, self._deadline)

    def _stop(self) -> None:
        """Pause and drop what was computed under the old weights, before anything changes."""
        self._paused_at = time.monotonic()
        self._link.is_held = True
        self._client.pause(self._pause, self._deadline)
        if self._pause == "in_place":
            # Running requests keep their cache by design. Without any, the prefixes of the old weights can and must go.
            with suppress(EngineRequestError):
                self._client.flush_cache(self._deadline, wait=False)
                self._flushed = True
        else:
            self._client.flush_cache(self._deadline, wait=True)
            self._flushed = True
        self._client.open_session(self._deadline)  # one that is open already is ours: no rank obeys anybody else

    def _commit(self) -> None:
        outcomes = self._link.command("commit", self._deadline, epoch=self._epoch)
        problems = [
            f"rank {rank}: {'the commit did not run' if outcome is None else outcome['error']}"
            for rank, outcome in enumerate(outcomes)
            if outcome is None or outcome.get("error")
        ]
        if problems:
            raise SyncError("; ".join(problems), phase="load")
        parts: Sequence[Mapping[str, float]] = [outcome["seconds"] for outcome in outcomes if outcome]
        for name in parts[0]:
            self._seconds[f"load_{name}"] = max(part[name] for part in parts)
        self._committed = True
        self._link.ask({"op": "finalize", "content": self._job.content}, self._deadline)
        self._link.refresh(self._deadline)

    def _serve(self) -> None:
        self._link.serve(self._deadline)
        self._stop_clock()

    def _put_back(self) -> None:
        """After a failure: one whole version on every rank, and the engine serves it, also where it was an earlier push
        that has left it paused; it stays paused where that cannot be shown."""
        patience = Deadline(_PUT_BACK_S)
        with suppress(WeightSyncError):
            if self._committed:  # every rank holds the new version; some may not have been told
                self._link.ask({"op": "finalize", "content": self._job.content}, patience)
            else:
                self._discard(patience)
            self._link.let_go(patience)
            self._stop_clock()

    def _discard(self, patience: Deadline) -> None:
        """What was staged goes, also from the parameters."""
        try:
            self._link.ask({"op": "discard"}, patience)  # a commit that is still queued in the engine finds nothing
        except SyncError:
            if self._phase != "load":
                raise
        if self._phase == "load":
            with suppress(WeightSyncError):  # whether it was needed, and has run, the ranks say
                self._client.open_session(patience)
                self._link.command("undo", patience)

    def _stop_clock(self) -> None:
        if self._paused_at is not None and not self._link.is_held:
            self._pause_seconds = time.monotonic() - self._paused_at
            self._paused_at = None

    def _timed(self, phase: str, step: Callable[[], None]) -> None:
        self._phase = phase
        start = time.monotonic()
        try:
            step()
        finally:
            self._seconds[phase] = time.monotonic() - start


def _starts(sizes: Sequence[int]) -> list[int]:
    starts: list[int] = []
    end = 0
    for size in sizes:
        starts.append(end)
        end += size
    return starts
