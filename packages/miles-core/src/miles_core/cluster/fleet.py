"""The engines of a run, an actor each, and the router in front of them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from miles_rollout.engines import EngineConfig, resolve_device

from . import actors
from .processes import spawn, stop_all


class Fleet:
    """The engines of one `[engines.NAME]` table, with a router in front when there is more than one."""

    def __init__(self, name: str, config: EngineConfig, *, model: Path, log: Path) -> None:
        self._name = name
        on_gpus = not config.urls and resolve_device(config.device, config.env) == "cuda"
        gpus = config.tp * config.dp if on_gpus else 0
        self._actors = [
            spawn(actors.EngineActor, num_gpus=gpus, concurrency=4)(
                config, index, model, log / f"engine-{name}-{index}.log"
            )
            for index in range(config.num_servers)
        ]
        self._router: Any = None
        self._log = log
        self.urls: list[str] = []
        """Of each engine: where weights are pushed to."""
        self.url = ""
        """Where sessions send requests: the router, or the only engine."""

    async def start(self) -> None:
        """Start every engine at once, or attach to the given ones, then start the router.

        Raises:
            EngineStartError: with the end of the engine's log.
        """
        self.urls = list(await asyncio.gather(*(actor.start.remote() for actor in self._actors)))
        if len(self.urls) == 1:
            self.url = self.urls[0]
            return
        self._router = spawn(actors.RouterActor)(self._log / f"router-{self._name}.log")
        self.url = await self._router.start.remote(self.urls)

    async def watch(self) -> None:
        """Runs until the engines are stopped; raises EngineDied, with the end of its log, when one ends by itself."""
        await asyncio.gather(*(actor.watch.remote() for actor in self._actors))

    async def stop(self) -> None:
        await stop_all([actor for actor in (self._router, *self._actors) if actor is not None], what="engine")
