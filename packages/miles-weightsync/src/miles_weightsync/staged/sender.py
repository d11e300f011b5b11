"""One trainer rank's part of a push: pack its pieces, and write them into every engine rank that needs them.

```
 leader ──write(engine, regions)─▶ worker: pack ─▶ checksum ─▶ write … ─▶ wait ──wrote(checksums)─▶ leader
        ──done─▶ return           (one worker an engine: a slow one holds up nobody else)
```
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import numpy as np
import xxhash
from numpy.typing import NDArray

from ..errors import SyncError, TransportError
from ..transports import Outbox, Region, Ticket
from ..wire import Channel, ConnectionLost, Message
from .deltas import Blobs
from .tables import EnginePlan, Load
from .values import Base, Values

PieceChecksums = list[tuple[int, int, list[str]]]
"""(engine rank, bucket, xxh3-128 of every piece)"""


class Sender:
    """Carries out the leader's orders for one push."""

    def __init__(
        self,
        channel: Channel,
        outbox: Outbox,
        values: Values,
        *,
        rank: int,
        window_bytes: int,
        blobs: Mapping[str, Blobs],
    ) -> None:
        """`blobs` are the deltas by the content that they start from."""
        self._channel, self._outbox, self._values, self._rank = channel, outbox, values, rank
        self._window_bytes = window_bytes
        self._blobs = blobs
        self._cancelled: set[int] = set()

    def serve(self, plans: Mapping[str, EnginePlan], *, timeout_s: float) -> None:
        """Work until the leader says that it is done.

        Raises:
            SyncError: the leader is gone.
        """
        workers = ThreadPoolExecutor(thread_name_prefix="weightsync sender", max_workers=64)
        try:
            while True:
                message = self._channel.receive(timeout_s)
                match message["op"]:
                    case "write":
                        plan = plans[str(message["plan"])]
                        workers.submit(self._work, message, plan.loads.get(self._rank, ()))
                    case "cancel":
                        self._cancelled.add(int(message["engine"]))
                    case _:
                        return
        except (ConnectionLost, TimeoutError) as error:
            raise SyncError(f"Trainer rank {self._rank} lost the leader of the push: {error}", phase="write") from None
        finally:
            self._cancelled.update(range(1 << 16))
            workers.shutdown(wait=True)

    def _work(self, message: Message, loads: Sequence[Load]) -> None:
        engine = int(message["engine"])
        answer: Message = {"engine": engine, "op": "wrote"}
        regions = [Region.from_json(text) for text in message["regions"]]
        try:
            starts = cast("list[list[int]] | None", message["starts"])
            base = cast("str | None", message["base"])
            answer |= self._write(engine, regions, loads, starts, base, float(message["timeout_s"]))
        except Exception as error:  # the boundary of this thread: the leader must hear of it, whatever it is
            known = isinstance(error, TransportError | SyncError)
            answer = {"engine": engine, "op": "failed", "error": str(error) if known else repr(error)}
        finally:
            for region in regions:
                self._outbox.cancel(region)
        with contextlib.suppress(ConnectionLost):  # `serve` notices as well
            self._channel.send(answer)

    def _write(
        self,
        engine: int,
        regions: list[Region],
        loads: Sequence[Load],
        starts: list[list[int]] | None,
        base: str | None,
        timeout_s: float,
    ) -> Message:
        deadline = time.monotonic() + timeout_s
        flying: list[Ticket] = []
        digests: list[tuple[int, int, str, str, list[int] | None]] = []
        total = 0
        for load in loads:
            if engine in self._cancelled:
                raise SyncError("the leader has given this engine up", phase="write")
            region = regions[load.dst]
            start = load.start if starts is None else starts[load.dst][load.bucket]
            nbytes = load.nbytes
            blobs = None
            if starts is not None:
                assert base is not None, "a delta starts from something"
                blobs = self._blobs[base].of(load)
                nbytes = sum(map(len, blobs))
            while flying and sum(ticket.nbytes for ticket in flying) + nbytes > self._window_bytes:
                self._outbox.wait([flying.pop(0)], timeout_s=max(deadline - time.monotonic(), 0.0))
            leased = self._outbox.lease(region, start, nbytes)
            data = np.empty(nbytes, np.uint8) if leased is None else leased
            if blobs is None:
                content = sent = self._pack(load, data)
            else:
                np.copyto(data, np.frombuffer(b"".join(blobs), np.uint8))
                sent, content = xxhash.xxh3_128_hexdigest(data.data), self._content(load)
            if leased is None:
                flying.append(self._outbox.write(region, start, data))
            digests.append((load.dst, load.bucket, sent, content, None if blobs is None else list(map(len, blobs))))
            total += nbytes
        self._outbox.wait(flying, timeout_s=max(deadline - time.monotonic(), 0.0))
        return {"digests": digests, "bytes": total}

    def _pack(self, load: Load, data: NDArray[np.uint8]) -> str:
        end = 0
        for item in load.items:
            bits = self._values.read(item)
            data[end : item.start] = 0
            end = item.start + bits.nbytes
            np.copyto(data[item.start : end].view(bits.dtype), bits)
        return xxhash.xxh3_128_hexdigest(data.data)

    def _content(self, load: Load) -> str:
        """The checksum that a packed bucket of the new values would have."""
        state = xxhash.xxh3_128()
        end = 0
        for item in load.items:
            bits = self._values.read(item)
            state.update(bytes(item.start - end))
            state.update(np.ascontiguousarray(bits).view(np.uint8).data)
            end = item.start + bits.nbytes
        return state.hexdigest()


def piece_checksums(values: Values | Base, loads: Sequence[Load]) -> PieceChecksums | None:
    """Of what this rank would send; None where it does not hold a piece of an earlier version."""
    found: PieceChecksums = []
    for load in loads:
        bits = [values.read(item) for item in load.items]
        if any(each is None for each in bits):
            return None
        sums = [xxhash.xxh3_128_hexdigest(each.view(np.uint8).data) for each in bits if each is not None]
        found.append((load.dst, load.bucket, sums))
    return found


class Senders:
    """The leader's side: orders to the ranks that have something for an engine, and what they answer."""

    def __init__(self, channels_R: Mapping[int, Channel]) -> None:
        self._channels_R = channels_R
        self._answers = threading.Condition()
        self._said: dict[tuple[int, int], Message] = {}
        self._lost: dict[int, str] = {}
        for rank, channel in channels_R.items():
            threading.Thread(target=self._listen, args=(rank, channel), daemon=True).start()

    def order(
        self,
        engine: int,
        plan: EnginePlan,
        regions: list[str],
        starts: list[list[int]] | None,
        base: str | None,
        left_s: float,
    ) -> None:
        """Have every rank write its part; `starts` and `base` are those of a delta."""
        message: Message = {"op": "write", "engine": engine, "plan": plan.key, "regions": regions, "starts": starts}
        message |= {"base": base, "timeout_s": left_s}
        with self._answers:
            for rank in plan.loads:
                self._said.pop((engine, rank), None)
        for rank in plan.loads:
            self._tell(rank, message)

    def collect(self, engine: int, plan: EnginePlan, *, timeout_s: float) -> list[Message]:
        """What every rank wrote.

        Raises:
            SyncError: one failed, is gone, or did not end in time; names the rank.
        """
        deadline = time.monotonic() + timeout_s
        waiting = set(plan.loads)
        found: list[Message] = []
        with self._answers:
            while waiting:
                for rank in sorted(waiting):
                    if (said := self._said.get((engine, rank))) is not None:
                        if said["op"] == "failed":
                            raise SyncError(f"trainer rank {rank}: {said['error']}", phase="write")
                        found.append(said)
                        waiting.discard(rank)
                    elif rank in self._lost:
                        raise SyncError(f"trainer rank {rank} is gone: {self._lost[rank]}", phase="write")
                if waiting and not self._answers.wait(max(deadline - time.monotonic(), 0.0)):
                    raise SyncError(f"trainer ranks {sorted(waiting)} did not finish writing in time", phase="write")
        return found

    def cancel(self, engine: int) -> None:
        """Have every rank stop writing to an engine."""
        for rank in self._channels_R:
            self._tell(rank, {"op": "cancel", "engine": engine})

    def done(self) -> None:
        """Let the ranks go."""
        for rank in self._channels_R:
            self._tell(rank, {"op": "done"})

    def close(self) -> None:
        """Close the connections; what was said arrives first."""
        for channel in self._channels_R.values():
            channel.close()

    def _tell(self, rank: int, message: Message) -> None:
        with contextlib.suppress(ConnectionLost):  # its listener knows
            self._channels_R[rank].send(message)

    def _listen(self, rank: int, channel: Channel) -> None:
        try:
            while True:
                message = channel.receive()
                with self._answers:
                    self._said[int(message["engine"]), rank] = message
                    self._answers.notify_all()
        except ConnectionLost as error:
            with self._answers:
                self._lost[rank] = str(error)
                self._answers.notify_all()
