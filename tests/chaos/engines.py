"""Scripted engines behind a scripted router, each in the place of the object that runs the real one.

An engine samples the word of the weights that it holds. It pauses for pushes, and can die, hang, and lose requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence

import numpy as np
from miles_rollout.engines import EngineDied, EngineProbe
from miles_tito.engine.generation import GenerateRequest, Generation, join, one_version
from miles_tito.errors import EngineError, RequestSwallowed
from miles_tito.records import FinishReason

from . import language
from .world import World

FIRST_PORT, ROUTER_PORT = 9000, 8000
TOKEN_S = 0.5
RESTART_S = 20.0
SILENCE_S = 90.0
"""Silence on a request after which it is taken for lost."""
LATE_S = 60.0


class ScriptedServer:
    """One engine; answers like `miles_rollout.engines.EngineServer`."""

    def __init__(self, url: str, world: World) -> None:
        self.url = url
        self._world = world
        self.node: int | None = None
        """Weights that it samples with; None before the first push and in the middle of one."""
        self.version = -1
        self.is_up = False
        self.is_hung = False
        self._changed = asyncio.Event()
        """Set, and replaced, whenever a call may have to look up."""
        self._calls: dict[str, bool] = {}
        """Whether each was aborted."""

    # ---- for the fleet

    async def start(self) -> None:
        await self._world.wait(RESTART_S)
        self.is_up, self.is_hung = True, False

    async def wait_ready(self) -> str:
        return self.url

    async def watch(self) -> None:
        while self.is_up:
            await self._changed.wait()
        raise EngineDied(f"The engine at {self.url} was killed.")

    async def stop(self) -> None:
        self.died()

    async def log_tail(self) -> str:
        return ""

    def died(self) -> None:
        """Process and weights are gone, and every call with them."""
        self.is_up = False
        self.node, self.version = None, -1
        self._notify()

    @property
    def answers(self) -> bool:
        return self.is_up and not self.is_hung

    def abort(self, *rids: str) -> None:
        """End these calls, or all, with the tokens that they have."""
        for rid in rids or [*self._calls]:
            if rid in self._calls:
                self._calls[rid] = True
        self._notify()

    # ---- for a push

    def pause(self, *, abort: bool) -> None:
        """Nothing is sampled until `serve`."""
        self.node = None
        if abort:
            self.abort()

    def serve(self, node: int, version: int) -> None:
        self.node, self.version = node, version
        self._notify()

    # ---- for sessions

    async def generate(self, request: GenerateRequest) -> Generation:
        """Words of the weights it holds, one after the other, until the budget is used up."""
        if request.rid in self._calls:
            raise EngineError(f"{self.url} answered 400: Duplicate request ID {request.rid}", status=400)
        self._calls[request.rid] = False
        pieces: list[Generation] = []
        try:
            while True:
                await self._next_token(request.rid)
                if not self.is_up:
                    raise EngineError(f"{self.url} did not answer {request.rid}: it died", retryable=True)
                if self._calls[request.rid]:
                    return join([*pieces, _piece([], -1, FinishReason.ABORT)])
                assert self.node is not None, "_next_token waits for weights"
                if len(pieces) == request.max_new_tokens - 1:
                    return join([*pieces, _piece([language.END], self.version, FinishReason.STOP)])
                pieces.append(_piece([language.word(self.node)], self.version, None))
        finally:
            del self._calls[request.rid]

    async def _next_token(self, rid: str) -> None:
        """Returns when one can be sampled, or when there will be none."""
        await asyncio.sleep(TOKEN_S)
        fault = self._world.fault("engine_dies", "engine_hangs")
        if fault is not None and fault.kind == "engine_dies":
            self.died()
        elif fault is not None:
            self.is_hung = True
        while self.is_up and (self.is_hung or (self.node is None and not self._calls[rid])):
            await self._changed.wait()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class ScriptedRouter:
    """Answers like `miles_rollout.engines.router.Router`; one that takes its place has no engines until it is told."""

    def __init__(self, world: World, *, port: int = 0) -> None:
        self._world = world
        self._url = f"http://127.0.0.1:{port or ROUTER_PORT}"
        self._urls: tuple[str, ...] = ()
        self._is_up = False
        self._routed = asyncio.Event()
        self.kill: Callable[[], None] = lambda: None
        """Ends its process."""

    # ---- for the fleet

    async def start(self) -> str:
        self._is_up = True
        self._world.routers[self._url] = self
        return self._url

    async def ended(self) -> str:
        await asyncio.Event().wait()
        return "never"

    async def set_workers(self, urls: Sequence[str], timeout_s: float) -> None:
        await self._world.wait(0.2)
        self._urls = tuple(urls)
        if urls:
            self._routed.set()
        else:
            self._routed.clear()

    async def stop(self) -> None:
        return None

    def died(self) -> None:
        """Nobody answers at its address; requests on their way through it come to nothing."""
        self._is_up = False
        self._routed.set()

    # ---- for sessions

    async def generate(self, request: GenerateRequest) -> Generation:
        fault = self._world.fault("request_lost", "reply_late", "router_dies")
        kind = "" if fault is None else fault.kind
        if kind == "router_dies":
            self.kill()
        if kind == "request_lost":
            await asyncio.Event().wait()
        await self._routed.wait()
        if not self._is_up:
            raise EngineError(f"{self._url} did not answer {request.rid}: connection refused", retryable=True)
        server = self._urls[int(self._world.dice("route", request.session_id) * len(self._urls))]
        generation = await self._world.engines[server].generate(request)
        if kind == "reply_late":
            await asyncio.sleep(LATE_S)
        if not self._is_up:
            raise EngineError(f"{self._url} did not answer {request.rid}: connection reset", retryable=True)
        return generation


class ScriptedPath:
    """The way from a session server to the engines: whatever router is at the address now."""

    def __init__(self, world: World, url: str) -> None:
        self._world = world
        self._url = url

    async def generate(self, request: GenerateRequest) -> Generation:
        try:
            async with asyncio.timeout(SILENCE_S):
                return await self._world.routers[self._url].generate(request)
        except TimeoutError as error:
            raise RequestSwallowed(f"no answer to {request.rid} for {SILENCE_S:g} s", retryable=True) from error

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[Generation, None]:
        yield await self.generate(request)

    async def abort(self, rid: str) -> None:
        for server in self._world.engines.values():
            server.abort(rid)

    async def aclose(self) -> None:
        return None


class ScriptedProbe(EngineProbe):
    """Asks the scripts."""

    def __init__(self, world: World) -> None:
        self._servers = world.engines

    async def version(self, url: str) -> int | None:
        server = self._servers[url]
        return server.version if server.answers else None

    async def makes_progress(self, url: str) -> bool:
        return self._servers[url].answers

    async def abort_all(self, url: str) -> None:
        self._servers[url].abort()


def _piece(ids: list[int], version: int, finish: FinishReason | None) -> Generation:
    return Generation(
        output_ids=np.asarray(ids, np.int32),
        logprobs=np.full(len(ids), -1.0, np.float32),
        versions=one_version(len(ids), version),
        finish_reason=finish,
    )
