"""When weights may leave the trainer: not between an optimizer step and its push, when they have no version yet.

```
 train(v+1) ── push(v+1) ── train(v+2) ── …      sync(v+1) of an engine that came back fits in between the two
 └──── one step ───────┘   └──────────
```
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager


class PushOrder:
    """Keeps optimizer steps, pushes to all engines, and pushes to single ones out of each other's way.

    `TrainerRanks` asks it before each of the three.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._version: int | None = None
        self._known = asyncio.Event()
        self._is_ahead = False
        """A step was trained and not pushed; the lock is still its."""

    async def begin_step(self) -> None:
        """Before a step changes the weights; nothing else leaves the trainer until their push, or `invalidate`.

        Steps that nobody pushes, as of supervised training, follow one another.
        """
        if not self._is_ahead:
            await self._lock.acquire()
        self._is_ahead = True
        self._set(None)

    @asynccontextmanager
    async def push(self, version: int) -> AsyncGenerator[None]:
        """Around a push to the fleet. Behind it, the trainer holds `version`, unless the push raised."""
        if not self._is_ahead:
            await self._lock.acquire()
        try:
            yield
            self._set(version)
        finally:
            self._is_ahead = False
            self._lock.release()

    @asynccontextmanager
    async def sync(self) -> AsyncGenerator[int]:
        """Around a push to one engine: waits until one may leave, and gives the version that the trainer holds."""
        while True:
            await self._known.wait()
            async with self._lock:
                if self._version is not None:
                    yield self._version
                    return

    def invalidate(self) -> None:
        """The trainer's weights are lost: no engine is synced before the next push."""
        self._set(None)
        if self._is_ahead:
            self._is_ahead = False
            self._lock.release()

    def _set(self, version: int | None) -> None:
        self._version = version
        if version is None:
            self._known.clear()
        else:
            self._known.set()
