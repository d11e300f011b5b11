"""The parts of a run as Ray actors."""

from __future__ import annotations

from pathlib import Path

from miles_core.config import Config
from miles_core.rundir import RunDir

from .fleet import Fleet
from .sessions import SessionServers
from .trainers import Trainers
from .workers import Workers


class RayParts:
    """Makes actors in the Ray that runs; implements `miles_core.parts.Parts`."""

    def __init__(self, config: Config, *, run_dir: RunDir) -> None:
        self._config = config
        self._run_dir = run_dir

    def trainers(self) -> Trainers:
        return Trainers(self._config.train)

    def fleet(self, model: Path) -> Fleet:
        name, engines = next((n, e) for n, e in self._config.engines.items() if e.role == "rollout")
        return Fleet(name, engines, model=model, log=self._run_dir.log)

    def sessions(self) -> SessionServers:
        return SessionServers(self._config.sessions.count)

    def workers(self) -> Workers:
        return Workers(self._config, run_dir=self._run_dir)
