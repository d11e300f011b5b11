"""Several engines as one, where no router stands before them: a session keeps to one, so its prefix stays cached."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from miles_tito.errors import EngineError

from .generation import Engine, GenerateRequest, Generation


class EnginePool:
    """Several engines as one `Engine`, for `miles-tito serve` without a router."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        if not engines:
            raise EngineError("An EnginePool needs at least one engine, got none.")
        self._engines = tuple(engines)

    async def generate(self, request: GenerateRequest) -> Generation:
        return await self._of(request.session_id).generate(request)

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[Generation, None]:
        async with aclosing(self._of(request.session_id).stream(request)) as pieces:
            async for piece in pieces:
                yield piece

    async def abort(self, rid: str) -> None:
        await asyncio.gather(*(engine.abort(rid) for engine in self._engines))

    async def aclose(self) -> None:
        await asyncio.gather(*(engine.aclose() for engine in self._engines))

    def _of(self, session_id: str) -> Engine:
        digest = hashlib.blake2b(session_id.encode(), digest_size=8).digest()
        return self._engines[int.from_bytes(digest, "big") % len(self._engines)]
