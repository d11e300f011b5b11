"""What all scripts of one start share: the seed's dice, the faults that are due, the record, every address."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .faults import Fault
from .record import Record

if TYPE_CHECKING:
    from .engines import ScriptedRouter, ScriptedServer
    from .sessions import ScriptedSessionServer


class World:
    """One start of a run, as its scripts know it."""

    def __init__(self, *, seed: int, start: int, faults: Sequence[Fault], record: Record) -> None:
        self.seed = seed
        self.start = start
        self.record = record
        self._due = {(fault.kind, fault.nth): fault for fault in faults if fault.start == start}
        self.occasions: Counter[str] = Counter()
        """How many of each kind of fault there were so far."""
        self._waits = 0
        self.main: asyncio.Task[None] | None = None
        """What Ctrl-C cancels."""
        self.engines: dict[str, ScriptedServer] = {}
        """By url, as those below."""
        self.routers: dict[str, ScriptedRouter] = {}
        self.session_servers: dict[str, ScriptedSessionServer] = {}

    def fault(self, *kinds: str) -> Fault | None:
        """The fault that is due at this occasion for one of `kinds`, if there is one. Each call is an occasion."""
        due: Fault | None = None
        for kind in kinds:
            self.occasions[kind] += 1
            due = due or self._due.get((kind, self.occasions[kind]))
        if due is not None:
            self.record.add("fault", start=self.start, kind=due.kind, nth=due.nth)
        return due

    def dice(self, *of: object) -> float:
        """A number in [0, 1) that depends on the seed and on `of` alone."""
        digest = hashlib.blake2b(repr((self.seed, *of)).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") / 2**64

    async def wait(self, most_s: float) -> None:
        """Something takes a while."""
        self._waits += 1
        await asyncio.sleep(most_s * self.dice("wait", self.start, self._waits))
