"""Running turns: who shares one, and how deadlines and idleness end sessions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from miles_tito import RequestError, Sampling, Session, Tokenizer
from miles_tito.server.dialects.base import TurnRequest
from miles_tito.server.dialects.chat import CHAT
from miles_tito.server.live_session import LiveSession, RecordedTurn, RunningTurn
from miles_tito.server.session_store import SessionStore
from miles_tito.sessions.turn_kinds import Hints
from miles_tito.testing import ScriptedEngine
from miles_tito.tokens.families.parser import TextPiece
from miles_tito.tokens.family_choice import choose_family
from miles_tito.tokens.merge import Joiner


@pytest.fixture
def open_live(tokenizer: Tokenizer) -> Callable[..., LiveSession]:
    joiner = Joiner(tokenizer, choose_family("tiny", tokenizer))

    def opened(*, deadline_at: float | None = None) -> LiveSession:
        return LiveSession(Session("s", joiner, max_context=1000), key_digest=b"", deadline_at=deadline_at)

    return opened


def ask(text: str, *more: dict[str, Any]) -> TurnRequest:
    body = {"messages": [{"role": "user", "content": text}, *more]}
    return CHAT.read(msgspec.json.encode(body), Sampling(), "m")[0]


async def content(running: RecordedTurn | RunningTurn) -> str:
    with running.attached():
        return (await running.result()).message["content"]


async def test_a_request_marked_as_a_retry_waits_for_the_running_one(
    tokenizer: Tokenizer, open_live: Callable[..., LiveSession]
):
    go = asyncio.Event()
    engine = ScriptedEngine(["one", "two"], tokenizer=tokenizer, before_token=lambda *_: go.wait())
    live = open_live()
    first = await live.start(ask("q"), engine)
    again = await live.start(ask("q"), engine, hints=Hints(is_retry=True))
    other = await live.start(ask("q"), engine)
    assert again is first
    assert other is not first
    go.set()
    assert await asyncio.gather(content(first), content(again), content(other)) == ["one", "one", "two"]
    assert live.session.num_turns == 2


async def test_a_turn_goes_on_as_long_as_anybody_waits(tokenizer: Tokenizer, open_live: Callable[..., LiveSession]):
    go = asyncio.Event()
    engine = ScriptedEngine(["one"], tokenizer=tokenizer, before_token=lambda *_: go.wait())
    live = open_live()
    running = await live.start(ask("q"), engine)
    with running.attached():
        with running.attached():
            pass
        go.set()
        assert (await running.result()).message["content"] == "one"


async def test_a_reader_that_was_busy_when_the_turn_ended_still_sees_the_end(
    tokenizer: Tokenizer, open_live: Callable[..., LiveSession]
):
    running = await open_live().start(ask("q"), ScriptedEngine(["one two"], tokenizer=tokenizer))
    text = ""
    with running.attached():
        async with asyncio.timeout(10):
            async for pieces in running.pieces():
                await running.result()
                text += "".join(piece.text for piece in pieces if isinstance(piece, TextPiece))
    assert text == "one two"


async def test_a_stream_that_waits_for_its_engine_gives_signs_of_life(
    tokenizer: Tokenizer, open_live: Callable[..., LiveSession], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("miles_tito.server.live_session._QUIET_S", 0.001)
    go = asyncio.Event()
    engine = ScriptedEngine(["one"], tokenizer=tokenizer, before_token=lambda *_: go.wait())
    running = await open_live().start(ask("q"), engine)
    seen: list[int] = []
    with running.attached():
        async for pieces in running.pieces():
            seen.append(len(pieces))
            if len(seen) == 3:
                go.set()
    assert seen[:3] == [0, 0, 0]
    assert sum(seen) > 0


async def test_a_deadline_ends_running_turns_and_keeps_the_record(
    tokenizer: Tokenizer, open_live: Callable[..., LiveSession]
):
    async def hold_second(asked: Any, n: int) -> None:
        if len(engine.requests) == 2:
            await asyncio.Event().wait()

    engine = ScriptedEngine(["one", "two"], tokenizer=tokenizer, before_token=hold_second)
    live, store = open_live(deadline_at=time.time() + 1000), SessionStore(idle_timeout_s=1000)
    store.add(live)
    assert await content(await live.start(ask("q"), engine)) == "one"
    running = await live.start(ask("other"), engine)
    waiting = asyncio.create_task(content(running))
    await store.sweep()
    assert not waiting.done(), "the deadline is far away"
    live.deadline = 0.0
    await store.sweep()
    with pytest.raises(RequestError, match="deadline of this session has passed") as caught:
        await waiting
    assert caught.value.status == 410
    with pytest.raises(RequestError, match="deadline of this session has passed"):
        await live.start(ask("q"), engine)
    assert [t.metadata["num_turns"] for t in store.get("s").session.trajectories()] == [1]


async def test_an_idle_session_is_forgotten_but_not_a_busy_one(
    tokenizer: Tokenizer, open_live: Callable[..., LiveSession]
):
    go = asyncio.Event()
    engine = ScriptedEngine(["one"], tokenizer=tokenizer, before_token=lambda *_: go.wait())
    live, store = open_live(), SessionStore(idle_timeout_s=1000)
    store.add(live)
    running = await live.start(ask("q"), engine)
    live.last_used = float("-inf")
    await store.sweep()
    assert len(store) == 1
    go.set()
    await content(running)
    await store.sweep()
    assert len(store) == 0
    with pytest.raises(RequestError, match="No session 's' here: never opened, closed, or unused for 1000 s"):
        store.get("s")
