"""Every trainer rank, an actor each, driven together."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from miles_quant.recipe.recipe import Recipe
from miles_rollout.engines import Supervisor, resolve_device
from miles_tito.errors import EngineError
from miles_tito.records.summary import GroupRef
from miles_train import Layout, TrainConfig, check_layouts
from miles_weightsync.config import PushConfig
from miles_weightsync.errors import SyncError
from ray.exceptions import RayActorError

from miles_core.actors.trainer_rank import Pushed
from miles_core.config import ModelConfig
from miles_core.parts import TrainerLost
from miles_core.run.batching import AdvantagesByEpisode, RankWork, plan_ranks
from miles_core.run.loop import Trained

from . import actors
from .processes import STOP_S, spawn
from .turns import Turns

logger = logging.getLogger(__name__)

DEATH_S = 5.0
"""From the death of a process until every caller knows."""


class Trainers:
    """Every trainer rank, driven together.

    Args:
        recipe: the low precision of training and engines; None for none.
    """

    def __init__(self, config: TrainConfig, recipe: Recipe | None = None) -> None:
        self._config = config
        self._recipe = recipe
        self._actors = _make_ranks(config, recipe)
        self._turns = Turns()
        self._engines: Callable[[], Supervisor] | None = None
        self._has_pushed = False
        self._layouts: Sequence[Layout] = ()

    async def prepare_model(self, config: ModelConfig, out: Path) -> Path:
        """The given model folder, or the one that `model.builder` makes.

        Raises:
            ModelError: there is no usable folder.
        """
        return await self._actors[0].prepare_model.remote(config, out)

    async def serving_folder(self, model: Path, out: Path) -> Path:
        """What engines start from: `model`, or its low-precision copy at `out`."""
        return await self._actors[0].serving_folder.remote(model, out)

    async def setup(self, config: TrainConfig, model: Path) -> Layout:
        """Load `model` into every rank; returns rank 0's layout. May be called again for another model or loss."""
        self._config = config
        init_method = await self._actors[0].address.remote() if config.ranks > 1 else None
        self._layouts = await self._all("setup", config, model, init_method)
        check_layouts(self._layouts)
        return self._layouts[0]

    async def connect(self, engines: Sequence[str], config: PushConfig) -> None:
        await self._all("connect", list(engines), config)

    def push_to(self, engines: Callable[[], Supervisor]) -> None:
        """Name who knows which engines serve; once, before the first push."""
        self._engines = engines

    def plan(self, groups: Sequence[GroupRef], advantages: AdvantagesByEpisode) -> list[RankWork]:
        return plan_ranks(
            groups,
            advantages=advantages,
            token_budget=self._config.token_budget,
            ranks=self._layouts[0].data_ranks,
            minibatches=self._config.minibatches,
            multiple_of=self._layouts[0].micro_batch_multiple,
        )

    async def train(self, work: Sequence[RankWork]) -> Trained:
        await self._turns.begin_step()
        try:
            return (await self._each("train", [(work[layout.data_rank],) for layout in self._layouts]))[0]
        except BaseException:
            self._turns.forget()
            raise

    async def push(self, version: int) -> dict[str, float]:
        """Every rank sends its own shards to the engines that serve; returns once one of them serves `version`.

        An engine that the push does not reach, tried twice, is dead: it is started again and then gets the version
        alone. While no engine serves, this waits for one to come back.

        Raises:
            SyncError: no engine was ever reached: the fault is not an engine's.
        """
        assert self._engines is not None, "push_to() comes first"
        engines = self._engines()
        async with self._turns.push(version):
            with engines.pushing():
                began = engines.serving
                pushed = await self._push(version, began)
                again = [url for url in engines.serving if url in pushed.failed]
                if again:
                    logger.warning("version %d is pushed once more: %s", version, dict(pushed.failed))
                    pushed = replace(pushed, failed=(await self._push(version, again)).failed)
                reached = [url for url in began if url in engines.serving and url not in pushed.failed]
                if began and not reached and not self._has_pushed and set(engines.serving) >= set(began):
                    raise SyncError(
                        f"Version {version} reached no engine: "
                        + "; ".join(f"{url} failed in {why}" for url, why in pushed.failed.items()),
                        phase="load",
                    )
                engines.pushed(version, reached=reached, failed=pushed.failed)
                self._has_pushed = self._has_pushed or bool(reached)
        await engines.wait_serving()
        return {
            **pushed.metrics,
            "sync/retries": float(bool(again)),
            "sync/failed_engines": float(len(began) - len(reached)),
        }

    async def sync(self, url: str) -> int:
        """Bring one engine, which does not serve yet, to the version of the others; returns it.

        Raises:
            EngineError: it did not take it.
        """
        async with self._turns.sync() as version:
            try:
                failed = (await self._push(version, [url])).failed
            except (SyncError, TrainerLost) as error:
                raise EngineError(f"version {version} was not sent to {url}: {error}") from error
            if failed:
                raise EngineError(f"version {version} did not reach {url}: {failed[url]}")
            return version

    async def load(self, path: Path) -> None:
        await self._all("load", path)

    async def begin_save(self, path: Path) -> None:
        await self._all("begin_save", path)

    async def finish_save(self) -> None:
        await self._all("finish_save")

    async def export(self, path: Path) -> None:
        await self._all("export", path)

    async def export_serving(self, path: Path) -> None:
        await self._all("export_serving", path)

    async def restart(self) -> None:
        """New processes in place of all of them, dead or not; `setup` comes next."""
        self._turns.forget()
        self._kill()
        self._actors = _make_ranks(self._config, self._recipe)

    async def stop(self) -> None:
        """A rank in the middle of a step cannot be asked: it is killed after the bounded wait."""
        try:
            async with asyncio.timeout(STOP_S / 2):
                await self._all("close")
        except Exception as error:  # a rank that crashed before has nothing left to close
            logger.debug("trainer ranks were killed: %s", error)
        self._kill()

    def _kill(self) -> None:
        for actor in self._actors:
            ray.kill(actor)

    async def _push(self, version: int, engines: Sequence[str]) -> Pushed:
        """How a push to `engines` ended."""
        return (await self._all("push", version, list(engines)))[0] if engines else Pushed()

    async def _all(self, method: str, *args: Any) -> list[Any]:
        return await self._each(method, [args] * len(self._actors))

    async def _each(self, method: str, args_R: Sequence[tuple[Any, ...]]) -> list[Any]:
        """The same call on every rank.

        Raises:
            TrainerLost: the process of a rank is gone.
        """
        calls = [
            asyncio.ensure_future(_result(getattr(actor, method).remote(*args)))
            for actor, args in zip(self._actors, args_R, strict=True)
        ]
        try:
            return await asyncio.gather(*calls)
        except RayActorError as error:
            raise TrainerLost(_dead(calls, method)) from error
        except Exception as error:
            # When a rank dies, what another says about its broken connection may come first.
            await asyncio.wait(calls, timeout=DEATH_S)
            if any(_is_dead(call) for call in calls):
                raise TrainerLost(_dead(calls, method)) from error
            raise
        finally:
            for call in calls:
                call.cancel()


def _make_ranks(config: TrainConfig, recipe: Recipe | None) -> list[Any]:
    gpus = 1 if resolve_device(config.device) == "cuda" else 0
    make = spawn(actors.TrainerActor, threads=config.threads, num_gpus=gpus)
    return [make(rank, recipe) for rank in range(config.ranks)]


async def _result(ref: Any) -> Any:
    return await ref


def _is_dead(call: asyncio.Future[Any]) -> bool:
    return call.done() and not call.cancelled() and isinstance(call.exception(), RayActorError)


def _dead(calls: Sequence[asyncio.Future[Any]], method: str) -> str:
    ranks = ", ".join(str(rank) for rank, call in enumerate(calls) if _is_dead(call))
    return f"The process of trainer rank {ranks} died in `{method}`; its log is in Ray's session folder."
