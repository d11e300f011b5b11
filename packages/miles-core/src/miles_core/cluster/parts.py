"""The parts of a run as Ray actors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from miles_rollout.engines import EngineConfig
from miles_weightsync.config import LOADER, PushConfig

from miles_core.config import Config
from miles_core.durable.rundir import RunDir
from miles_core.parts import Note

from .evaluation import EvalEngines
from .fleet import Fleet
from .sessions import SessionServers
from .trainers import Trainers
from .workers import Workers


class RayParts:
    """Makes actors in the Ray that runs; implements `miles_core.parts.Parts`."""

    def __init__(self, config: Config, *, run_dir: RunDir) -> None:
        self._config = config
        self._run_dir = run_dir
        self._trainers = Trainers(config.train, config.quant)
        self._fleet: Fleet | None = None
        self._sessions = SessionServers(
            config.sessions.count, state=run_dir.path / "sessions", engines=self._engine_urls
        )
        self._workers = Workers(config, run_dir=run_dir, note=self._note)
        self._listener: Note | None = None

    def tell(self, note: Note) -> None:
        self._listener = note

    def trainers(self) -> Trainers:
        return self._trainers

    def fleet(self, model: Path) -> Fleet:
        name, engines = next((n, e) for n, e in self._config.engines.items() if e.role == "rollout")
        fleet = Fleet(
            name,
            with_receiver(engines, self._config.sync),
            model=model,
            log=self._run_dir.log,
            sessions=self._sessions,
            workers=self._workers,
            sync=self._trainers.sync,
            note=self._note,
        )
        self._trainers.push_to(lambda: fleet.supervisor)
        self._fleet = fleet
        return fleet

    def sessions(self) -> SessionServers:
        return self._sessions

    def workers(self) -> Workers:
        return self._workers

    def evaluation(self, model: Path) -> EvalEngines:
        return EvalEngines(self._config, run_dir=self._run_dir, model=model, note=self._note)

    def _engine_urls(self) -> list[str]:
        assert self._fleet is not None, "engines start before the sessions in front of them"
        return self._fleet.urls

    def _note(self, kind: str, subject: str, text: str) -> None:
        if self._listener is not None:
            self._listener(kind, subject, text)


def with_receiver(engines: EngineConfig, sync: PushConfig) -> EngineConfig:
    """Engines as `sync` needs them to be started; those that run already must have been started so."""
    if sync.way != "staged" or engines.urls:
        return engines
    given = engines.options.get("custom-weight-loader", ())
    loaders = [*given] if isinstance(given, Sequence) and not isinstance(given, str) else [given]
    return replace(engines, options={**engines.options, "custom-weight-loader": [*loaders, LOADER]})
