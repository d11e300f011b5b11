"""A worker process without Ray: building the user's environment, and spooling what training will see."""

from __future__ import annotations

import asyncio
import itertools
import shutil
import sys
import types
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import pytest
from miles_core.actors import rollout_worker as workers
from miles_core.actors.rollout_worker import EnvError, RolloutWorker, build_env
from miles_core.actors.session_server import SessionServer, SessionSettings
from miles_core.config import EnvConfig
from miles_core.durable.spool import SpoolAddress, SpoolError, read_group, read_groups
from miles_rollout.config import RolloutConfig
from miles_rollout.dispatch import GroupRequest
from miles_tito.records import Ctx, EpisodeResult, Group, Outcome, Policy, Prompt, Sampling
from miles_tito.shared.plugins import ImportStringError


class Sums:
    """An environment that grades without asking the policy."""

    def __init__(self, *, number: int = 3) -> None:
        self.number = number
        self.is_closed = False

    def tasks(self, split: str) -> Iterable[Prompt]:
        return [Prompt(id=f"{split}-{i}") for i in range(self.number)]

    async def run(self, prompt: Prompt, policy: Policy, ctx: Ctx) -> EpisodeResult:
        return EpisodeResult(outcome=Outcome.GRADED, reward=1.0)

    async def aclose(self) -> None:
        self.is_closed = True


class Endless(Sums):
    def tasks(self, split: str) -> Iterable[Prompt]:
        return (Prompt(id=str(i)) for i in itertools.count())


def broken_factory() -> Sums:
    return len(3)  # pyright: ignore[reportArgumentType]


@pytest.fixture(autouse=True)
def user_module(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = types.ModuleType("user_env")
    module.Sums, module.broken, module.ready, module.number = Sums, broken_factory, Sums(number=5), 3
    module.nothing = lambda: None
    monkeypatch.setitem(sys.modules, "user_env", module)


def test_a_factory_gets_its_arguments_and_an_object_is_taken_as_it_is() -> None:
    assert len(list(build_env(EnvConfig(target="user_env:Sums", args={"number": 4})).tasks("train"))) == 4
    assert len(list(build_env(EnvConfig(target="user_env:ready")).tasks("train"))) == 5


@pytest.mark.parametrize(
    ("target", "args", "error", "message"),
    [
        ("user_env:Sums", {"numbr": 4}, ImportStringError, "takes .*number.* unexpected keyword argument 'numbr'"),
        ("user_env:Sum", {}, ImportStringError, "no 'Sum'. Did you mean Sums"),
        ("user_env:number", {}, ImportStringError, "a int that cannot be called"),
        ("user_env:nothing", {}, EnvError, r"returned a NoneType that is no Env: it needs `tasks\(split\)`"),
        ("user_env:ready", {"number": 4}, EnvError, "an environment and not a factory, but `env.args` is"),
        ("user_env:broken", {}, TypeError, r"^object of type 'int' has no len\(\)$"),
    ],
)
def test_what_is_no_environment_is_told(
    target: str, args: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        build_env(EnvConfig(target=target, args=args))


async def open_worker(folder: Path, env: Any, stored: list[Group] | None = None) -> RolloutWorker:
    def store(group: Group) -> str:
        if stored is not None:
            stored.append(group)
        return f"stored {group.id}"

    sys.modules["user_env"].ready = env  # pyright: ignore[reportAttributeAccessIssue]
    worker = RolloutWorker(
        name="worker-0",
        env=EnvConfig(target="user_env:ready"),
        config=RolloutConfig(group_size=2, retries=0),
        num_workers=1,
        run_id="run",
        trajectories=folder,
        store=store,
    )
    await worker.open()
    return worker


async def test_prompts_are_limited_and_an_endless_or_empty_split_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "MOST_PROMPTS", 50)
    endless, empty = await open_worker(tmp_path, Endless()), await open_worker(tmp_path, Sums(number=0))
    assert [prompt.id for prompt in await endless.prompts("train", 2)] == ["0", "1"]
    assert len(await endless.prompts("train", 60)) == 60
    with pytest.raises(EnvError, match=r"more than 50 prompts, maybe without end. .*`num_prompts`"):
        await endless.prompts("train", None)
    with pytest.raises(EnvError, match="no prompts in split 'train'"):
        await empty.prompts("train", None)
    await asyncio.gather(endless.stop(), empty.stop())


async def test_the_environment_is_closed_even_if_that_fails(tmp_path: Path) -> None:
    class Stubborn(Sums):
        async def aclose(self) -> None:
            raise ConnectionError("the sandbox is gone")

    env, stubborn = Sums(), Stubborn()
    await (await open_worker(tmp_path, env)).stop()
    assert env.is_closed
    worker = await open_worker(tmp_path, stubborn)
    with pytest.raises(ConnectionError):
        await worker.stop()
    with pytest.raises(OSError, match="Bad file descriptor"):
        worker._spool.close()  # pyright: ignore[reportPrivateUsage, reportOptionalMemberAccess]  (closed already)


@pytest.fixture
async def sessions(tmp_path: Path) -> AsyncIterator[str]:
    """A real session server; no episode of these tests asks its engine."""
    from miles_train.models.tiny_tokenizer import save_tokenizer, train_tokenizer

    save_tokenizer(train_tokenizer(0), tmp_path)
    server = SessionServer()
    settings = SessionSettings(
        engine_url="http://127.0.0.1:9",
        engines=("http://127.0.0.1:9",),
        tokenizer=tmp_path,
        family="auto",
        model="tiny",
        max_context=64,
        api_key="secret",
        state=tmp_path / "sessions",
    )
    yield await server.start(settings)
    await server.stop()


async def test_a_group_is_in_the_spool_before_its_reference_leaves(tmp_path: Path, sessions: str) -> None:
    stored: list[Group] = []
    worker = await open_worker(tmp_path / "run", Sums(), stored)
    await worker.connect([sessions], api_key="secret")
    ref = await worker.run_group(GroupRequest(prompt=Prompt(id="p"), group_id="g0", group_size=2))
    assert (ref.handle.ref, ref.handle.directory) == ("stored g0", tmp_path / "run")
    assert [episode.error is None for episode in ref.episodes] == [False, False], "nothing was sampled"
    file, offset = ref.metadata["spool"]
    spooled = read_group(tmp_path / "run", SpoolAddress(file=file, offset=offset))
    assert (spooled.id, spooled.prompt_id, len(spooled.episodes)) == ("g0", "p", 2)
    assert [group.id for group in stored] == ["g0"]
    await worker.stop()


async def test_groups_that_finish_at_once_are_spooled_one_after_the_other(tmp_path: Path, sessions: str) -> None:
    worker = await open_worker(tmp_path / "run", Sums())
    await worker.connect([sessions], api_key="secret")
    refs = await asyncio.gather(
        *(worker.run_group(GroupRequest(prompt=Prompt(id="p"), group_id=f"g{n}", group_size=1)) for n in range(20))
    )
    await worker.stop()
    by_offset = [ref.id for ref in sorted(refs, key=lambda ref: ref.metadata["spool"][1])]
    assert [group.id for group in read_groups(tmp_path / "run" / "worker-0.000.spool")] == by_offset


async def test_a_group_of_an_evaluation_is_neither_spooled_nor_stored(tmp_path: Path, sessions: str) -> None:
    stored: list[Group] = []
    worker = await open_worker(tmp_path / "run", Sums(), stored)
    await worker.connect([sessions], api_key="secret")
    ref = await worker.evaluate_group(
        GroupRequest(prompt=Prompt(id="p"), group_id="e0", group_size=1, sampling=Sampling(temperature=0.0))
    )
    assert (ref.handle, dict(ref.metadata), stored) == (None, {}, [])
    assert list(read_groups(tmp_path / "run" / "worker-0.000.spool")) == []
    await worker.stop()


async def test_conversations_of_an_evaluation_are_kept_in_its_folder(
    tmp_path: Path, sessions: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    worker = await open_worker(tmp_path / "run", Sums())
    await worker.connect([sessions], api_key="secret")

    async def evaluate(group_id: str, step: int) -> None:
        folder = tmp_path / "eval" / f"step-{step}"
        await worker.evaluate_group(GroupRequest(prompt=Prompt(id="p"), group_id=group_id, group_size=1), folder=folder)

    await asyncio.gather(*(evaluate(f"a{i}", 1) for i in range(3)))
    await evaluate("b", 2)
    shutil.rmtree(tmp_path / "eval" / "step-2")  # its evaluation is made again
    await evaluate("c", 2)
    kept = {
        folder.name: [group.id for file in folder.glob("*.spool") for group in read_groups(file)]
        for folder in (tmp_path / "eval").iterdir()
    }
    assert {name: sorted(ids) for name, ids in kept.items()} == {"step-1": ["a0", "a1", "a2"], "step-2": ["c"]}
    (tmp_path / "eval" / "step-3").write_text("in the way")
    await evaluate("d", 3)
    assert "the conversations of d are not kept" in caplog.text
    await worker.stop()


async def test_a_group_that_cannot_be_spooled_is_an_error_and_not_lost_quietly(
    tmp_path: Path, sessions: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = await open_worker(tmp_path / "run", Sums())
    await worker.connect([sessions], api_key="secret")

    def full(group: Group) -> SpoolAddress:
        raise SpoolError("Cannot spool group g0")

    monkeypatch.setattr(worker._spool, "append", full)  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(SpoolError, match="Cannot spool group g0"):
        await worker.run_group(GroupRequest(prompt=Prompt(id="p"), group_id="g0", group_size=1))
    await worker.stop()
