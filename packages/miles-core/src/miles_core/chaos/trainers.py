"""Scripted trainer ranks: what they train is a list of what they trained, and their weights are a number.

Turns, pushes, retries and syncs around them are the cluster's own.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from miles_tito.records import Group, Trajectory
from miles_tito.records.summary import GroupRef
from miles_train import Layout
from miles_train.config import TrainConfig
from miles_train.errors import CheckpointError
from miles_weightsync.config import PushConfig

from miles_core.actors.trainer_rank import Pushed
from miles_core.cluster.trainers import Trainers
from miles_core.cluster.turns import Turns
from miles_core.config import ModelConfig
from miles_core.durable.spool import fetch_groups
from miles_core.parts import TrainerLost
from miles_core.run.batching import AdvantagesByEpisode, RankWork
from miles_core.run.loop import Trained

from . import language
from .clock import VirtualLoop
from .engines import ScriptedServer
from .world import World

STATE = "state.json"
CALL_S, TRAIN_S, PUSH_S, SAVE_S = 0.5, 8.0, 1.0, 12.0


@dataclass(slots=True, kw_only=True)
class TrainerState:
    """What a checkpoint holds: the weights, and everything that this lineage of them was trained on."""

    version: int = 0
    node: int = 0
    groups: list[list[Any]] = field(default_factory=list)
    """[version that it made, group id, prompt id] of each group of each batch."""
    rows: list[list[Any]] = field(default_factory=list)
    """[version, node trained from, group id, episode id, attempt, trajectory id, nodes of its trained tokens]."""


class ScriptedTrainers(Trainers):
    """Implements `miles_core.parts.Trainers`; only the processes of the ranks are scripts."""

    def __init__(self, world: World, config: TrainConfig, *, servers: Sequence[ScriptedServer]) -> None:
        self._config = config
        self._world = world
        self._turns = Turns()
        self._engines = None
        self._has_pushed = False
        self._ranks = _Ranks(world, servers)

    async def prepare_model(self, config: ModelConfig, out: Path) -> Path:
        _write_json(out / "config.json", {"max_position_embeddings": self._config.token_budget})
        return out

    async def serving_folder(self, model: Path, out: Path) -> Path:
        return model

    async def setup(self, config: TrainConfig, model: Path) -> Layout:
        await self._all("setup")
        known = {"ranks": config.ranks, "data_ranks": config.ranks, "num_parameters": 0, "vocab_size": 0}
        self._layouts = [Layout(rank=r, data_rank=r, device="scripted", **known) for r in range(config.ranks)]
        return self._layouts[0]

    def plan(self, groups: Sequence[GroupRef], advantages: AdvantagesByEpisode) -> list[RankWork]:
        self._ranks.batch = [(group.id, group.prompt_id) for group in groups]
        return super().plan(groups, advantages)

    async def restart(self) -> None:
        self._turns.forget()
        self._ranks.die()
        await self._world.wait(TRAIN_S)
        self._ranks.come_back()

    async def stop(self) -> None:
        self._ranks.die()

    async def _all(self, method: str, *args: Any) -> list[Any]:
        return [await self._ranks.call(method, *args)]

    async def _each(self, method: str, args_R: Sequence[tuple[Any, ...]]) -> list[Any]:
        return [await self._ranks.call(method, [work for (work,) in args_R])]


class _Ranks:
    """All ranks at once."""

    def __init__(self, world: World, servers: Sequence[ScriptedServer]) -> None:
        self._world = world
        self._servers = {server.url: server for server in servers}
        self._state: TrainerState | None = None
        self._is_alive = True
        self._pause = PushConfig().pause
        self._writing: asyncio.Task[None] | None = None
        self._methods: Mapping[str, tuple[Callable[..., Awaitable[Any]], float]] = {
            "setup": (self._setup, CALL_S),
            "load": (self._load, CALL_S),
            "connect": (self._connect, CALL_S),
            "train": (self._train, TRAIN_S),
            "push": (self._push, CALL_S),
            "begin_save": (self._begin_save, CALL_S),
            "finish_save": (self._finish_save, CALL_S),
            "export": (self._export, CALL_S),
            "export_serving": (self._export, CALL_S),
        }
        self.batch: Sequence[tuple[str, str]] = ()
        """Group id and prompt id of each group of the batch that was planned last."""

    async def call(self, method: str, *args: Any) -> Any:
        """One call to the ranks: it takes a while, and they may die before it or behind it."""
        work, most_s = self._methods[method]
        await self._world.wait(most_s)
        fault = self._world.fault("trainer_lost", "trainer_lost_after")
        if fault is not None and fault.kind == "trainer_lost":
            self.die()
        result = await work(*args) if self._is_alive else None
        if fault is not None:
            self.die()
        if not self._is_alive:
            raise TrainerLost(f"The process of trainer rank 0 died in `{method}`.")
        return result

    def die(self) -> None:
        self._is_alive = False
        self._state = None
        if self._writing is not None:
            self._writing.cancel()

    def come_back(self) -> None:
        self._is_alive = True
        self._writing = None

    @property
    def _now(self) -> TrainerState:
        assert self._state is not None, "setup comes first"
        return self._state

    async def _setup(self) -> str:
        self._state = TrainerState()
        return "scripted"

    async def _load(self, path: Path) -> None:
        self._state = read_state(path)

    async def _connect(self, engines: Sequence[str], config: PushConfig) -> None:
        self._pause = config.pause

    async def _train(self, work: Sequence[RankWork]) -> Trained:
        state = self._now
        version, node = state.version + 1, state.node
        for rank in work:
            groups = fetch_groups(rank.handles, get=lambda refs: refs, lost=(LookupError,))
            for row in (row for step in rank.steps for rows in step.micro_batches for row in rows):
                state.rows.append([version, node, *_row(groups[row.group], row.episode, row.trajectory)])
        state.groups += [[version, group, prompt] for group, prompt in self.batch]
        state.version = version
        state.node = self._world.record.new_weights(parent=node, version=version)
        _progress()
        return Trained(version=version, metrics={"chaos/node": float(state.node)})

    async def _push(self, version: int, urls: Sequence[str]) -> Pushed:
        assert version == self._now.version, f"push of version {version}, but the ranks hold {self._now.version}"
        node = self._now.node
        failed: dict[str, str] = {}
        reached = [self._servers[url] for url in urls if self._servers[url].answers]
        for server in reached:
            server.pause(abort=self._pause == "abort")
        await self._world.wait(PUSH_S)
        for url in urls:
            server = self._servers[url]
            if server not in reached or not server.answers:
                failed[url] = "it does not answer"
            elif self._world.fault("push_fails") is not None:
                failed[url] = "it refused a bucket"
            else:
                server.serve(node, version)
        _progress()
        return Pushed(failed=failed)

    async def _begin_save(self, path: Path) -> None:
        self._writing = asyncio.create_task(self._write(path, json.dumps(asdict(self._now))), name=f"write {path}")

    async def _finish_save(self) -> None:
        assert self._writing is not None, "begin_save comes first"
        writing = self._writing
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            if self._is_alive:
                raise
        except OSError as error:
            raise CheckpointError(f"{error}; free space, then resume the run.") from error
        _progress()

    async def _export(self, path: Path) -> None:
        _write_json(path / STATE, asdict(self._now))

    async def _write(self, path: Path, text: str) -> None:
        """In two parts, so that a kill finds half a file."""
        await self._world.wait(SAVE_S)
        os.makedirs(path, exist_ok=True)
        fd = os.open(path / STATE, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            for part in (text[: len(text) // 2], text[len(text) // 2 :]):
                await self._world.wait(SAVE_S)
                _write_all(fd, part.encode())
            os.fsync(fd)
        finally:
            os.close(fd)


def read_state(path: Path) -> TrainerState:
    return TrainerState(**json.loads((path / STATE).read_text()))


def _write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def _write_all(fd: int, content: bytes) -> None:
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(fd, rest) :]


def _row(group: Group, episode: int, trajectory: int) -> list[Any]:
    played = group.episodes[episode]
    sampled = played.trajectories[trajectory]
    return [group.id, played.id, played.attempt, sampled.id, sampled_by(sampled)]


def sampled_by(trajectory: Trajectory) -> list[int]:
    """The weights that sampled the trained tokens, by what the tokens themselves say."""
    tokens: list[int] = trajectory.tokens[trajectory.loss_mask].tolist()
    return [node for token in sorted(set(tokens)) if (node := language.node_of(token)) is not None]


def _progress() -> None:
    loop = asyncio.get_running_loop()
    if isinstance(loop, VirtualLoop):
        loop.progress()
