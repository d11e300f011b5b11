"""The processes of a run as scripts: what `miles_core.cluster` starts with Ray is made here instead, in this process.

Everything above the processes is the real thing: who is called when, what a death does, who is started again. The
objects inside are the real rollout workers, and scripts for trainer ranks, engines, router and session servers.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

from fake_ray import FakeActor, FakeRay
from miles_core.actors import rollout_worker
from miles_core.actors.rollout_worker import RolloutWorker
from miles_core.actors.session_server import SessionServer
from miles_core.actors.trainer_rank import TrainerRank
from miles_core.batching import AdvantagesByEpisode, RankWork, plan_ranks
from miles_core.cluster import fleet, remote, trainers
from miles_core.config import Config
from miles_rollout.engines import EngineServer
from miles_rollout.engines.router import Router
from miles_tito.records.summary import GroupRef

from .engines import FIRST_PORT, ScriptedProbe, ScriptedRouter, ScriptedServer
from .environment import ScriptedEnv
from .sessions import ScriptedSessionClient, ScriptedSessionServer
from .settings import num_prompts
from .trainers import CALL_S, TRAIN_S, Gang, ScriptedRank
from .world import World

QUIET = ("prepare_model", "serving_folder", "free_port", "close")
"""Calls to a trainer rank that take no time and that no fault meets."""


class ScriptedRay(FakeRay):
    """Makes the processes of one start; they die as the seed says."""

    def __init__(self, world: World, config: Config) -> None:
        super().__init__(
            {
                TrainerRank: self._rank,
                EngineServer: self._engine,
                Router: lambda *, port=0, **_: ScriptedRouter(world, port=port),
                SessionServer: lambda: ScriptedSessionServer(world),
            }
        )
        self.world = world
        self.env = ScriptedEnv(world, num_prompts=num_prompts(config))
        self._config = config
        self._gang = Gang(world, size=config.train.ranks)
        self._engines = 0

    def spawn(self, plain: type, held: Any) -> FakeActor:
        actor = super().spawn(plain, held)
        if isinstance(held, ScriptedSessionServer | ScriptedRouter):
            held.kill = actor.die
        return actor

    def on_death(self, actor: FakeActor) -> None:
        if not isinstance(actor.held, RolloutWorker):
            actor.held.died()

    async def run(self, actor: FakeActor, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if actor.plain is RolloutWorker and name == "run_group":
            (request,) = args
            self.world.record.add("run", start=self.world.start, group=request.group_id, attempt=request.attempt)
            if self.world.fault("worker_dies") is not None:
                actor.die()
        elif actor.plain is TrainerRank and name not in QUIET:
            return await self._run_rank(actor, name, args, kwargs)
        return await super().run(actor, name, args, kwargs)

    async def _run_rank(self, actor: FakeActor, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One call to a rank: it takes a while, and the rank may die before it or behind it."""
        await self.world.wait(TRAIN_S if name == "train" else CALL_S)
        fault = self.world.fault("trainer_lost", "trainer_lost_after")
        if fault is not None and fault.kind == "trainer_lost":
            actor.die()
        result = await super().run(actor, name, args, kwargs)
        if fault is not None:
            actor.die()
        return result

    def _rank(self, *, rank: int, **_: Any) -> ScriptedRank:
        if rank in self._gang.ranks or self._gang.is_lost:
            self._gang = Gang(self.world, size=self._config.train.ranks)
        self._gang.ranks.add(rank)
        return ScriptedRank(self._gang, rank=rank, token_budget=self._config.train.token_budget)

    def _engine(self, *_: Any, port: int, **__: Any) -> ScriptedServer:
        url = f"http://127.0.0.1:{port or FIRST_PORT + len(self.world.engines)}"
        self.world.engines[url] = ScriptedServer(url, self.world)
        return self.world.engines[url]

    def plan(self, groups: Sequence[GroupRef], *, advantages: AdvantagesByEpisode, **sizes: int) -> list[RankWork]:
        """The real plan; the ranks are told of groups without a row to train as well."""
        self._gang.batch = [(group.id, group.prompt_id) for group in groups]
        return plan_ranks(groups, advantages=advantages, **sizes)


@contextmanager
def scripted(world: World, config: Config) -> Generator[ScriptedRay]:
    """Inside this block the processes of a run are scripts, and so are the environment and the network between them."""
    ray = ScriptedRay(world, config)
    with ExitStack() as patches:
        for module, name, new in (
            (remote, "ray", ray),
            (fleet, "EngineProbe", partial(ScriptedProbe, world)),
            (trainers, "plan_ranks", ray.plan),
            (rollout_worker, "build_env", lambda _: ray.env),
            (rollout_worker, "SessionClient", lambda urls, api_key: ScriptedSessionClient(world, urls)),
        ):
            patches.enter_context(patch.object(module, name, new))
        yield ray
