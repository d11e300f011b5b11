"""Scripted trainer ranks: what they train is a list of what they trained, and their weights are a number."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from miles_core.actors.trainer_rank import Pushed
from miles_core.batching import RankWork, Trained
from miles_core.config import ModelConfig
from miles_core.durable.spool import fetch_groups
from miles_tito.records import Group, Trajectory
from miles_train import Layout
from miles_train.config import TrainConfig
from miles_train.errors import CheckpointError
from miles_weightsync.config import PushConfig

from . import language
from .clock import VirtualLoop
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


class ScriptedRank:
    """Answers like `miles_core.actors.trainer_rank.TrainerRank`; what it does, all ranks of its gang do together."""

    def __init__(self, gang: Gang, *, rank: int, token_budget: int) -> None:
        self._gang = gang
        self._rank = rank
        self._token_budget = token_budget

    async def prepare_model(self, config: ModelConfig, out: Path) -> Path:
        _write_json(out / "config.json", {"max_position_embeddings": self._token_budget})
        return out

    async def serving_folder(self, model: Path, out: Path) -> Path:
        return model

    async def free_port(self) -> int:
        return 1

    async def setup(self, config: TrainConfig, model: Path, init_method: str | None) -> Layout:
        await self._together("setup", self._gang.setup)
        return Layout(
            rank=self._rank,
            ranks=config.ranks,
            data_rank=self._rank,
            data_ranks=config.ranks,
            device="scripted",
            num_parameters=0,
            vocab_size=0,
        )

    async def connect(self, engines: Sequence[str], config: PushConfig) -> None:
        await self._together("connect", lambda: self._gang.connect(config))

    async def train(self, work: RankWork) -> Trained:
        self._gang.work[self._rank] = work
        return await self._together("train", self._gang.train)

    async def push(self, version: int, engines: Sequence[str]) -> Pushed:
        return await self._together("push", lambda: self._gang.push(version, engines))

    async def begin_save(self, path: Path) -> None:
        await self._together("begin_save", lambda: self._gang.begin_save(path))

    async def finish_save(self) -> None:
        await self._together("finish_save", self._gang.finish_save)

    async def load(self, path: Path) -> None:
        await self._together("load", lambda: self._gang.load(path))

    async def export(self, path: Path) -> None:
        await self._together("export", lambda: self._gang.export(path))

    async def export_serving(self, path: Path) -> None:
        await self._together("export_serving", lambda: self._gang.export(path))

    async def close(self) -> None:
        return None

    def died(self) -> None:
        self._gang.lose()

    async def _together(self, name: str, work: Callable[[], Awaitable[Any]]) -> Any:
        return await self._gang.together(self._rank, name, work)


class Gang:
    """All ranks that were started together: a call takes place when the last of them has come to it."""

    def __init__(self, world: World, *, size: int) -> None:
        self._world = world
        self._size = size
        self._state: TrainerState | None = None
        self._pause = PushConfig().pause
        self._writing: asyncio.Task[None] | None = None
        self._waiting: dict[str, tuple[set[int], asyncio.Future[Any]]] = {}
        """By call: the ranks that have come to it, and its result."""
        self._running: dict[asyncio.Task[Any], asyncio.Future[Any]] = {}
        self.is_lost = False
        self.ranks: set[int] = set()
        self.work: dict[int, RankWork] = {}
        self.batch: Sequence[tuple[str, str]] = ()
        """Group id and prompt id of each group of the batch that was planned last."""

    async def together(self, rank: int, name: str, work: Callable[[], Awaitable[Any]]) -> Any:
        if self.is_lost:
            raise _broken()
        here, result = self._waiting.setdefault(name, (set(), asyncio.get_running_loop().create_future()))
        here.add(rank)
        if len(here) == self._size:
            del self._waiting[name]
            task = asyncio.ensure_future(work())
            self._running[task] = result
            task.add_done_callback(self._answer)
        return await asyncio.shield(result)

    def lose(self) -> None:
        """A process of it died: the others find their connections broken."""
        self.is_lost = True
        self._state = None
        if self._writing is not None:
            self._writing.cancel()
        for task in [*self._running]:
            task.cancel()
        for result in [*self._running.values(), *(result for _, result in self._waiting.values())]:
            _settle(result, error=_broken())

    def _answer(self, task: asyncio.Task[Any]) -> None:
        result = self._running.pop(task)
        if task.cancelled():
            _settle(result, error=_broken())
        elif (error := task.exception()) is not None:
            _settle(result, error=error)
        elif not result.done():
            result.set_result(task.result())

    # ---- what they do

    @property
    def now(self) -> TrainerState:
        assert self._state is not None, "setup comes first"
        return self._state

    async def setup(self) -> None:
        self._state = TrainerState()

    async def load(self, path: Path) -> None:
        self._state = read_state(path)

    async def connect(self, config: PushConfig) -> None:
        self._pause = config.pause

    async def train(self) -> Trained:
        state = self.now
        version, node = state.version + 1, state.node
        for _, work in sorted(self.work.items()):
            groups = fetch_groups(work.handles, get=lambda refs: refs, lost=(LookupError,))
            for row in (row for step in work.steps for rows in step.micro_batches for row in rows):
                state.rows.append([version, node, *_row(groups[row.group], row.episode, row.trajectory)])
        state.groups += [[version, group, prompt] for group, prompt in self.batch]
        state.version = version
        state.node = self._world.record.new_weights(parent=node, version=version)
        _progress()
        return Trained(version=version, metrics={"chaos/node": float(state.node)})

    async def push(self, version: int, urls: Sequence[str]) -> Pushed:
        assert version == self.now.version, f"push of version {version}, but the ranks hold {self.now.version}"
        node = self.now.node
        failed: dict[str, str] = {}
        engines = self._world.engines
        reached = [engines[url] for url in urls if engines[url].answers]
        for server in reached:
            server.pause(abort=self._pause == "abort")
        await self._world.wait(PUSH_S)
        for url in urls:
            server = engines[url]
            if server not in reached or not server.answers:
                failed[url] = "it does not answer"
            elif self._world.fault("push_fails") is not None:
                failed[url] = "it refused a bucket"
            else:
                server.serve(node, version)
        _progress()
        return Pushed(failed=failed)

    async def begin_save(self, path: Path) -> None:
        self._writing = asyncio.create_task(self.write(path, json.dumps(asdict(self.now))), name=f"write {path}")

    async def finish_save(self) -> None:
        assert self._writing is not None, "begin_save comes first"
        try:
            await asyncio.shield(self._writing)
        except OSError as error:
            raise CheckpointError(f"{error}; free space, then resume the run.") from error
        _progress()

    async def export(self, path: Path) -> None:
        _write_json(path / STATE, asdict(self.now))

    async def write(self, path: Path, text: str) -> None:
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


def sampled_by(trajectory: Trajectory) -> list[int]:
    """The weights that sampled the trained tokens, by what the tokens themselves say."""
    tokens: list[int] = trajectory.tokens[trajectory.loss_mask].tolist()
    return [node for token in sorted(set(tokens)) if (node := language.node_of(token)) is not None]


def _row(group: Group, episode: int, trajectory: int) -> list[Any]:
    played = group.episodes[episode]
    sampled = played.trajectories[trajectory]
    return [group.id, played.id, played.attempt, sampled.id, sampled_by(sampled)]


def _broken() -> RuntimeError:
    return RuntimeError("Connection closed by peer")


def _settle(result: asyncio.Future[Any], *, error: BaseException) -> None:
    if not result.done():
        result.set_exception(error)
        result.exception()  # ranks that died do not look at it


def _write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def _write_all(fd: int, content: bytes) -> None:
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(fd, rest) :]


def _progress() -> None:
    loop = asyncio.get_running_loop()
    if isinstance(loop, VirtualLoop):
        loop.progress()
