"""Every trainer rank, a process each, driven together; and the way of their weights to the engines.

train ─▶ push(version): all that serve ─▶ once more where it failed ─▶ what failed twice is dead
sync(url): the version of the others to one engine that came back, never between a step and its push
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from miles_quant.recipe.recipe import Recipe
from miles_rollout.engines import Supervisor, resolve_device
from miles_tito.errors import EngineError, MilesError
from miles_tito.records.summary import GroupRef
from miles_train import Layout, TrainConfig, check_layouts
from miles_weightsync.config import PushConfig
from miles_weightsync.errors import SyncError

from miles_core.actors.trainer_rank import Pushed, TrainerRank
from miles_core.batching import AdvantagesByEpisode, Trained, plan_ranks
from miles_core.config import ModelConfig

from .push_order import PushOrder
from .remote import STOP_S, ProcessDied, Remote, Resources, call_each, fetch

logger = logging.getLogger(__name__)

CHECKPOINT = "checkpoint"
"""Group of the call that waits for a checkpoint, beside the one that trains."""


class TrainerLost(MilesError, RuntimeError):
    """A trainer rank's process is gone, and with it the step it was in. The others cannot go on without it."""


class TrainerRanks:
    """The trainer of a run, made of all its ranks. Any method raises TrainerLost when a rank's process has died.

    `started` makes it; the run trains, pushes and saves with it, and calls `restart` when a rank was lost.
    """

    def __init__(self, config: TrainConfig, recipe: Recipe | None = None) -> None:
        """
        Args:
            recipe: the low precision of training and engines; None for none.
        """
        self._config = config
        self._recipe = recipe
        resources = Resources(
            num_gpus=1 if resolve_device(config.device) == "cuda" else 0,
            threads=config.threads,
            groups={CHECKPOINT: 1},
        )
        self._ranks = [
            Remote(TrainerRank, kind="trainer rank", name=str(rank), resources=resources)
            for rank in range(config.ranks)
        ]
        self._order = PushOrder()
        self._has_pushed = False
        self._layouts: Sequence[Layout] = ()
        self._spawn()

    async def prepare_model(self, config: ModelConfig, out: Path) -> Path:
        """The given model folder, or the one that `model.builder` makes at `out`.

        Raises:
            ModelError: there is no usable folder.
        """
        return await self._first("prepare_model", config, out)

    async def serving_folder(self, model: Path, out: Path) -> Path:
        """What engines start from: `model`, or its low-precision copy, made at `out`, where they hold codes."""
        return await self._first("serving_folder", model, out)

    async def setup(self, config: TrainConfig, model: Path) -> Layout:
        """Load `model` into every rank; returns rank 0's layout. May be called again for another model or loss."""
        self._config = config
        init_method = None
        if config.ranks > 1:
            init_method = f"tcp://{await self._first('node_address')}:{await self._first('free_port')}"
        self._layouts = await self._all("setup", config, model, init_method)
        check_layouts(self._layouts)
        return self._layouts[0]

    async def connect(self, engines: Sequence[str], config: PushConfig) -> None:
        """Name all engines that pushes may go to."""
        await self._all("connect", list(engines), config)

    async def train(self, groups: Sequence[GroupRef], *, advantages: AdvantagesByEpisode) -> Trained:
        """One batch: raw rewards to advantages, rows to ranks, and the steps on them."""
        work = plan_ranks(
            groups,
            advantages=advantages,
            token_budget=self._config.token_budget,
            ranks=self._layouts[0].data_ranks,
            minibatches=self._config.minibatches,
            multiple_of=self._layouts[0].micro_batch_multiple,
        )
        await self._order.begin_step()
        try:
            return (await self._each("train", [(work[layout.data_rank],) for layout in self._layouts]))[0]
        except BaseException:
            self._order.invalidate()
            raise

    async def push(self, version: int, *, engines: Supervisor) -> dict[str, float]:
        """Every rank sends its own shards to the engines that serve; returns once one of them serves `version`.

        An engine that the push does not reach, tried twice, is dead: it is started again and then gets the version
        alone. While no engine serves, this waits for one to come back.

        Raises:
            SyncError: no engine was ever reached: the fault is not an engine's.
        """
        async with self._order.push(version):
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
        async with self._order.sync() as version:
            try:
                failed = (await self._push(version, [url])).failed
            except (SyncError, TrainerLost) as error:
                raise EngineError(f"version {version} was not sent to {url}: {error}") from error
            if failed:
                raise EngineError(f"version {version} did not reach {url}: {failed[url]}")
            return version

    async def load(self, path: Path) -> None:
        """Weights, moments, schedule, random states and version of a checkpoint.

        Raises:
            CheckpointError: it is absent, incomplete or of another model.
        """
        await self._all("load", path)

    async def begin_save(self, path: Path) -> None:
        """Copy what a checkpoint holds; training may go on when this returns, and `path` is being written."""
        await self._all("begin_save", path)

    async def finish_save(self) -> None:
        """Wait until what `begin_save` started is on disk.

        Raises:
            CheckpointError: some rank could not write it.
        """
        await self._each("finish_save", [()] * len(self._ranks), group=CHECKPOINT)

    async def export(self, path: Path) -> None:
        """Write a Hugging Face folder of the master weights."""
        await self._all("export", path)

    async def export_serving(self, path: Path) -> None:
        """Write a Hugging Face folder of what engines hold: the same, but for a run in low precision."""
        await self._all("export_serving", path)

    async def restart(self) -> None:
        """New processes in place of all of them, dead or not; `setup` comes next."""
        self._order.invalidate()
        self._spawn()

    async def stop(self) -> None:
        """A rank in the middle of a step cannot be asked: it is killed after the bounded wait."""
        try:
            async with asyncio.timeout(STOP_S / 2):
                await self._all("close")
        except Exception as error:  # a rank that crashed before has nothing left to close
            logger.debug("trainer ranks were killed: %s", error)
        for rank in self._ranks:
            rank.kill()

    def _spawn(self) -> None:
        for number, rank in enumerate(self._ranks):
            rank.spawn(rank=number, recipe=self._recipe, fetch=fetch)

    async def _push(self, version: int, engines: Sequence[str]) -> Pushed:
        """How a push to `engines` ended."""
        return (await self._all("push", version, list(engines)))[0] if engines else Pushed()

    async def _first(self, method: str, *args: Any) -> Any:
        return (await self._each(method, [args], ranks=self._ranks[:1]))[0]

    async def _all(self, method: str, *args: Any) -> list[Any]:
        return await self._each(method, [args] * len(self._ranks))

    async def _each(
        self,
        method: str,
        args_R: Sequence[tuple[Any, ...]],
        *,
        ranks: Sequence[Remote] | None = None,
        group: str | None = None,
    ) -> list[Any]:
        try:
            return await call_each(self._ranks if ranks is None else ranks, method, args_R, group=group)
        except ProcessDied as died:
            raise TrainerLost(str(died)) from died
