"""The recipe tasks against a real session server and the tiny model's own tokenizer; only the engine is scripted."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import pytest
from miles_envs.tasks.arithmetic import ToolSum
from miles_rollout.dispatch import GroupRequest
from miles_rollout.worker import Worker
from miles_tito.client import SessionClient
from miles_tito.engine.generation import GenerateRequest
from miles_tito.records import Outcome, Sampling
from miles_tito.server import create_app, serve
from miles_tito.testing import ScriptedEngine
from miles_tito.tokens.tokenizer import Tokenizer, load_tokenizer
from miles_train.models.tiny_tokenizer import save_tokenizer, train_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tiny")
    save_tokenizer(train_tokenizer(0), folder)
    return load_tokenizer(folder)


@contextlib.asynccontextmanager
async def session_server(engine: ScriptedEngine, tokenizer: Tokenizer):
    app = create_app(engine=engine, tokenizer=tokenizer, family="auto", model="tiny", max_context=256)
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(serve(app, ready=ready.set_result))
    try:
        yield await asyncio.wait_for(ready, 30)
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def call(a: int, b: int) -> str:
    return f'<tool_call>\n{{"name": "add", "arguments": {{"a": {a}, "b": {b}}}}}\n</tool_call>'


async def test_a_tool_sum_is_recorded_token_by_token_and_trains_only_what_was_sampled(tokenizer: Tokenizer):
    env = ToolSum()
    prompt = next(iter(env.tasks("train")))
    assert prompt.messages
    a, b = map(int, prompt.messages[0]["content"].removesuffix("=?").split("+"))
    right, wrong = [call(a, b), str(a + b)], [call(a, b + 1), str(a + b + 1)]
    unused = iter([right, wrong])
    turns: dict[str, Iterator[str]] = {}

    def reply(request: GenerateRequest) -> str:
        if request.session_id not in turns:
            turns[request.session_id] = iter(next(unused))
        return next(turns[request.session_id])

    engine = ScriptedEngine(reply, tokenizer=tokenizer)
    async with session_server(engine, tokenizer) as url:
        sessions = SessionClient([url])
        worker = Worker(
            env=env, sessions=sessions, sampling=Sampling(max_tokens=24), run_id="r", episode_timeout_s=30, permits=8
        )
        group = await worker.run_group(GroupRequest(prompt=prompt, group_id="g0", group_size=2))
        await sessions.aclose()
    await env.aclose()

    assert {episode.outcome for episode in group.episodes} == {Outcome.GRADED}
    assert sorted(episode.reward for episode in group.episodes) == [0.0, 1.0]  # pyright: ignore[reportArgumentType]
    for episode in group.episodes:
        (trajectory,) = episode.trajectories
        texts = right if episode.reward else wrong
        sampled = [*tokenizer.encode(texts[0]), tokenizer.eos_ids[0], *tokenizer.encode(texts[1]), tokenizer.eos_ids[0]]
        assert trajectory.tokens[trajectory.loss_mask].tolist() == sampled
        assert len(trajectory.tokens) <= 48
        assert episode.metrics == {"turns": 2, "tool_calls": 1, "tool_errors": 0}
