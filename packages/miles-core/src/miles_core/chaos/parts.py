"""The parts of a run as scripts; implements `miles_core.parts.Parts`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from miles_rollout.engines.health import HealthConfig
from miles_rollout.engines.supervisor import Supervisor

from miles_core.config import Config
from miles_core.durable.rundir import RunDir
from miles_core.evaluation.dedicated import EvalServing
from miles_core.parts import Note

from .engines import Router, ScriptedProbe, ScriptedServer
from .environment import ScriptedEnv
from .sessions import ScriptedSessions
from .trainers import ScriptedTrainers
from .workers import ScriptedWorkers
from .world import World

NUM_PROMPTS = 11
"""Few, so that a small run has several epochs."""
HEALTH = HealthConfig(
    probe_interval_s=10.0, progress_interval_s=30.0, dead_after_s=40.0, max_restarts=20, backoff_s=2.0
)


def num_prompts(config: Config) -> int:
    return config.env.num_prompts or NUM_PROMPTS


class ScriptedParts:
    """Makes the parts of one start, in this process."""

    def __init__(self, world: World, config: Config, *, run_dir: RunDir, num_engines: int = 2) -> None:
        self._world = world
        self._config = config
        self._run_dir = run_dir
        self.servers = [ScriptedServer(f"http://engine-{i}", world) for i in range(num_engines)]
        self.router = Router(self.servers, world)
        self.env = ScriptedEnv(world, num_prompts=num_prompts(config))
        self._trainers = ScriptedTrainers(world, config.train, servers=self.servers)
        self.session_server = ScriptedSessions(world, self.router)
        self._note: Note = lambda kind, subject, text: None

    def tell(self, note: Note) -> None:
        self._note = note

    def trainers(self) -> ScriptedTrainers:
        return self._trainers

    def fleet(self, model: Path) -> ScriptedFleet:
        supervisor = Supervisor(
            self.servers,
            routing=self.router,
            probe=ScriptedProbe(self.servers),
            sync=self._trainers.sync,
            config=HEALTH,
            on_event=lambda event: self._note("engine", event.url, f"{event.old} → {event.new}: {event.reason}"),
        )
        self._trainers.push_to(lambda: supervisor)
        return ScriptedFleet(self.servers, supervisor)

    def sessions(self) -> ScriptedSessions:
        return self.session_server

    def workers(self) -> ScriptedWorkers:
        return ScriptedWorkers(self._world, self._config, run_dir=self._run_dir, env=self.env)

    def evaluation(self, model: Path) -> EvalServing:
        raise AssertionError("no seed's run has engines of its own for evaluation")


class ScriptedFleet:
    """Implements `miles_core.parts.Fleet`."""

    def __init__(self, servers: Sequence[ScriptedServer], supervisor: Supervisor) -> None:
        self._servers = servers
        self._supervisor = supervisor
        self.url = "http://router"

    @property
    def urls(self) -> list[str]:
        return [server.url for server in self._servers]

    async def start(self) -> None:
        for server in self._servers:
            await server.start()
        self._supervisor.started()

    def metrics(self) -> dict[str, float]:
        return self._supervisor.metrics()

    async def watch(self) -> None:
        await self._supervisor.run()

    async def stop(self) -> None:
        for server in self._servers:
            await server.kill()
