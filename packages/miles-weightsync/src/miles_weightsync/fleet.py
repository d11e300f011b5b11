"""All engines of a push, as the leader drives them; on other ranks an empty fleet, so that one code path serves all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch

from .buckets import Bucket
from .checksum import EngineLayout, ExpectedChecksums
from .config import PushConfig
from .engine import is_local
from .errors import SyncError
from .fit import misfits
from .lane import Lane
from .payload import encode
from .report import EngineOutcome
from .staging import Stage


class Fleet:
    """The lanes of one push, and the checksums they will be compared with."""

    def __init__(self, urls: Sequence[str], *, config: PushConfig, api_key: str | None) -> None:
        self._config = config
        self._lanes = [Lane(url, pause=config.pause, timeout_s=config.timeout_s, api_key=api_key) for url in urls]
        self._expected: dict[EngineLayout, ExpectedChecksums] = {}
        self._hasher = ThreadPoolExecutor(max_workers=1, thread_name_prefix="push checksums")
        self._hashes: list[Future[None]] = []
        self._users: dict[int, list[Future[None]]] = {}

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(lane.url for lane in self._lanes)

    @property
    def is_lost(self) -> bool:
        """No engine can still get this version."""
        return bool(self._lanes) and all(lane.failed for lane in self._lanes)

    def probe(self) -> None:
        """Ask every engine how it was started; fail those that this way of updating cannot reach."""
        wait([lane.probe() for lane in self._lanes])
        for lane in self._lanes:
            if lane.facts is None or self._config.way == "disk":
                continue
            if not is_local(lane.url):
                lane.cancel("probe", "it is on another host, where shared memory does not reach; use `way = disk`.")
            elif lane.facts.dp > 1:
                lane.cancel(
                    "probe",
                    f"it runs {lane.facts.dp} data-parallel replicas, for which SGLang refuses tensor updates; "
                    "use `way = disk`, or one engine a replica.",
                )

    def sent_dtype(self) -> str | None:
        """Element type to send floating-point tensors in; None keeps the trainer's."""
        if self._config.dtype != "auto":
            return None if self._config.dtype == "keep" else self._config.dtype
        layouts = {lane.url: EngineLayout.of(lane.facts) for lane in self._lanes if lane.facts and not lane.failed}
        dtypes = {layout.dtype for layout in layouts.values() if layout.model is not None}
        if len(dtypes) > 1:
            held = ", ".join(f"{url}: {layout.dtype}" for url, layout in layouts.items())
            raise SyncError(f"The engines hold different element types ({held}); set `dtype`.", phase="prepare")
        return dtypes.pop() if dtypes else None

    def kept(self) -> frozenset[str]:
        """Tensors that keep their element type when the others are converted to the engines'."""
        if self._config.dtype != "auto":
            return frozenset()
        layouts = {lane.facts.layout for lane in self._lanes if lane.facts and lane.facts.layout}
        return frozenset(name for layout in layouts for name in layout.model.always_float32())

    def check(self, buckets: Sequence[Bucket]) -> None:
        """Fail engines whose model is not what is pushed; they are not touched."""
        whole = self._config.verify == "checksum"
        found: dict[EngineLayout, list[str]] = {}
        for lane in self._lanes:
            if lane.facts is not None and not lane.failed:
                layout = EngineLayout.of(lane.facts)
                if layout not in found:
                    found[layout] = misfits(layout, buckets, whole=whole)
                if found[layout]:
                    lane.cancel("plan", "; ".join(found[layout]) + ". Push what belongs to the model that it serves.")

    def expect(self) -> None:
        """Prepare the checksums of every layout in the fleet."""
        for lane in self._lanes:
            if lane.facts is not None and not lane.failed:
                layout = EngineLayout.of(lane.facts)
                self._expected.setdefault(layout, ExpectedChecksums(layout))

    @property
    def unknown_architectures(self) -> set[str]:
        """Architectures that can be verified in part only."""
        lanes = [lane for lane in self._lanes if lane.facts is not None]
        return {lane.facts.architecture for lane in lanes if lane.facts and lane.facts.layout is None}

    def open(self, *, session: bool) -> None:
        for lane in self._lanes:
            lane.open(session=session)

    def hash(self, bucket: Bucket, data: torch.Tensor) -> Future[None]:
        """Feed a written bucket to the expected checksums, beside the engines' loading."""

        def run() -> None:
            for expected in self._expected.values():
                expected.add(bucket, data)

        future = self._hasher.submit(run)
        self._hashes.append(future)
        return future

    def load(self, bucket: Bucket, stage: Stage, *, index: int) -> None:
        """Send a staged bucket to every engine; `wait_for` tells when the stage is free again."""
        users = [self.hash(bucket, stage.data)]
        for lane in self._lanes:
            if not lane.failed and lane.facts is not None:
                # Each rank of each engine gets a name of its own: see `shm`.
                users.append(lane.load([encode(bucket, stage.handle(bucket)) for _ in range(lane.facts.tp)]))
        self._users[index] = users

    def wait_for(self, stage: Stage, *, index: int) -> None:
        """Wait until engines and checksums are done with what was last staged here."""
        for future in self._users.pop(index, []):
            future.result()
        stage.retire_handles()

    def load_disk(self, path: str) -> None:
        for lane in self._lanes:
            lane.load_disk(path)

    def commit(self, version: int, *, session: bool, trusted: Mapping[str, frozenset[str]]) -> None:
        """Close the session, verify, stamp, and let each engine generate as soon as it is done."""
        for lane in self._lanes:
            if session:
                lane.end()
            if self._config.verify == "checksum":
                lane.verify(self._expected_of(lane), trusted=trusted.get(lane.url, frozenset()))
            lane.resume(version)

    def cancel(self, phase: str, reason: str) -> None:
        """Skip what is still queued."""
        for lane in self._lanes:
            lane.cancel(phase, reason)

    def finish(self) -> tuple[EngineOutcome, ...]:
        """Wait for every engine, at most until its deadline."""
        try:
            return tuple(lane.finish() for lane in self._lanes)
        finally:
            self._hasher.shutdown(wait=True)

    def equal_names(self) -> dict[str, frozenset[str]]:
        """For each engine, the parameters whose checksums were equal."""
        return {lane.url: lane.comparison.equal for lane in self._lanes if lane.comparison is not None}

    def _expected_of(self, lane: Lane) -> Callable[[], ExpectedChecksums]:
        def ready() -> ExpectedChecksums:
            for future in self._hashes:
                future.result()
            assert lane.facts is not None, "an engine that was never probed is never verified"
            return self._expected[EngineLayout.of(lane.facts)]

        return ready
