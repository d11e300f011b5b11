"""Sessions that outlive their server: what a killed one leaves behind, and what the next one makes of it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from miles_tito import SessionError, Tokenizer, Trajectory, create_app
from miles_tito.records import encoding
from miles_tito.testing import ScriptedEngine

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


class Client:
    """One agent; `url` may change under it, as when a server comes back."""

    def __init__(self, http: httpx.AsyncClient, url: str) -> None:
        self.http = http
        self.url = url
        self.auth: dict[str, str] = {}

    async def open(self, **fields: Any) -> None:
        response = await self.http.post(f"{self.url}/sessions", json={"session_id": "s", **fields})
        assert response.status_code == 201, response.text
        self.auth = {"Authorization": f"Bearer {response.json()['api_key']}"}

    async def say(self, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        response = await self.http.post(
            f"{self.url}/sessions/s/v1/chat/completions", json={"messages": messages, **fields}, headers=self.auth
        )
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]["message"]

    async def trajectories(self) -> tuple[Trajectory, ...]:
        response = await self.http.get(f"{self.url}/sessions/s/trajectories?picker=leaves", headers=self.auth)
        assert response.status_code == 200, response.text
        return encoding.decode_many(response.content, Trajectory)

    async def tree(self) -> dict[str, Any]:
        return (await self.http.get(f"{self.url}/sessions/s", headers=self.auth)).json()


@pytest.fixture
def running(tokenizer: Tokenizer, served: Any) -> Callable[..., Any]:
    """A server on a state folder, and a client."""

    @contextlib.asynccontextmanager
    async def run(engine: ScriptedEngine, state_dir: Path, client: Client | None = None) -> AsyncIterator[Client]:
        app = create_app(
            engine=engine, tokenizer=tokenizer, family="auto", model="m", max_context=4096, state_dir=state_dir
        )
        async with served(app) as url, httpx.AsyncClient(trust_env=False, timeout=30) as http:
            if client is None:
                client = Client(http, url)
            client.http, client.url = http, url
            yield client

    return run


def killed(state_dir: Path) -> Path:
    """What a server killed at this moment would leave."""
    copy = state_dir.with_name(f"{state_dir.name}-after")
    shutil.copytree(state_dir, copy)
    return copy


async def test_a_session_goes_on_behind_the_same_ids_after_its_server_was_killed(
    tokenizer: Tokenizer, running: Any, tmp_path: Path
):
    engine = ScriptedEngine([f"see\n{CALL}", "é 漢"], tokenizer=tokenizer, version=3)
    messages = [user("q")]
    async with running(engine, tmp_path / "a") as client:
        await client.open(sampling={"temperature": 0.5, "max_tokens": 99}, metadata={"task": 7})
        messages += [await client.say(messages, tools=TOOLS), {"role": "tool", "content": "1"}]
        messages += [await client.say(messages, tools=TOOLS), user("more")]
        [before] = await client.trajectories()
        tree = await client.tree()
        left = killed(tmp_path / "a")
    engine = ScriptedEngine(["end"], tokenizer=tokenizer, version=4)
    async with running(engine, left, client) as client:
        assert await client.tree() == tree
        [restored] = await client.trajectories()
        assert encoding.encode(restored) == encoding.encode(before)
        await client.say(messages, tools=TOOLS)
        [after] = await client.trajectories()
    assert after.tokens[: len(before.tokens)].tolist() == before.tokens.tolist()
    assert [span.version for span in after.versions] == [3, 3, 4]
    assert (after.metadata["task"], after.metadata["num_turns"], after.temperature) == (7, 3, 0.5)


async def test_a_turn_cut_off_by_the_crash_is_asked_again_and_recorded_once(
    tokenizer: Tokenizer, running: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    started = asyncio.Event()

    async def hold(asked: Any, n: int) -> None:
        if len(engine.requests) == 2:
            started.set()
            await asyncio.Event().wait()

    engine = ScriptedEngine(["one", "never"], tokenizer=tokenizer, before_token=hold)
    messages = [user("q")]
    async with running(engine, tmp_path / "a") as client:
        await client.open()
        messages += [await client.say(messages), user("more")]
        lost = asyncio.create_task(client.say(messages))
        await started.wait()
        left = killed(tmp_path / "a")
        lost.cancel()
    aborted = asyncio.Event()
    again = ScriptedEngine(["two"], tokenizer=tokenizer)
    abort = again.abort

    async def see(rid: str) -> None:
        assert rid == engine.requests[1].rid
        await abort(rid)
        aborted.set()

    again.abort = see
    async with running(again, left, client) as client:
        await aborted.wait()
        assert "1 turns were under way" in caplog.text
        assert (await client.say(messages))["content"] == "two"
        [trajectory] = await client.trajectories()
        tree = await client.tree()
    assert trajectory.metadata["num_turns"] == 2
    assert (tree["num_turns"], tree["num_discarded"]) == (2, 1)
    assert [node["id"] for node in tree["nodes"]] == [0, 2], "the id of the lost turn is not given out again"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_reply_recorded_but_not_delivered_answers_the_request_that_repeats_it(
    stream: bool, tokenizer: Tokenizer, running: Any, tmp_path: Path
):
    text = f"<think>\nhm\n</think>\n\nsee\n{CALL}"
    engine = ScriptedEngine([text], tokenizer=tokenizer)
    async with running(engine, tmp_path / "a") as client:
        await client.open()
        reply = await client.say([user("q")], tools=TOOLS)
        [journal] = (tmp_path / "a").glob("*.journal")
        data = journal.read_bytes()
    left = tmp_path / "b"
    left.mkdir()
    delivered = data.rindex(b"delivered")
    (left / "s.journal").write_bytes(data[: delivered - len("\0\0\0\0\0\0\0\0") - len("xxtype") - 1])
    again = ScriptedEngine(["another"], tokenizer=tokenizer)
    async with running(again, left, client) as client:
        if stream:
            body = {"messages": [user("q")], "tools": TOOLS, "stream": True}
            url = f"{client.url}/sessions/s/v1/chat/completions"
            events = (await client.http.post(url, json=body, headers=client.auth)).text
            assert '"reasoning_content":"hm"' in events
            assert reply["tool_calls"][0]["id"] in events
        else:
            assert await client.say([user("q")], tools=TOOLS) == reply
        assert again.requests == []
        assert len((await client.tree())["nodes"]) == 1
        assert (await client.say([user("q")], tools=TOOLS))["content"] == "another", "it was delivered by now"


@pytest.mark.parametrize("cut", [1, 9, 30])
async def test_a_torn_last_record_is_dropped_with_a_warning(
    cut: int, tokenizer: Tokenizer, running: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    async with running(ScriptedEngine(["one", "two"], tokenizer=tokenizer), tmp_path / "a") as client:
        await client.open()
        first = [user("q"), await client.say([user("q")]), user("more")]
        size = (tmp_path / "a" / "s.journal").stat().st_size
        await client.say(first)
        left = killed(tmp_path / "a")
    journal = left / "s.journal"
    journal.write_bytes(journal.read_bytes()[: size + cut])
    async with running(ScriptedEngine(["again"], tokenizer=tokenizer), left, client) as client:
        assert f"its last {cut} bytes are dropped" in caplog.text
        assert (await client.say(first))["content"] == "again"
        assert [t.metadata["num_turns"] for t in await client.trajectories()] == [2]
        left = killed(left)
    async with running(ScriptedEngine([]), left, client) as client:
        assert [t.metadata["num_turns"] for t in await client.trajectories()] == [2]


async def test_a_damaged_journal_costs_its_own_session_only(
    tokenizer: Tokenizer, running: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    async with running(ScriptedEngine(["one"], tokenizer=tokenizer), tmp_path / "a") as client:
        await client.open()
        await client.say([user("q")])
        left = killed(tmp_path / "a")
    (left / "empty.journal").write_bytes(b"")
    (left / "noise.journal").write_bytes(b"\xff" * 40)
    async with running(ScriptedEngine([]), left, client) as client:
        assert len(await client.trajectories()) == 1
        assert (await client.http.get(f"{client.url}/health")).json()["sessions"] == 1
    assert "empty.journal holds no whole record" in caplog.text
    assert "noise.journal holds no whole record" in caplog.text


async def test_a_session_that_ended_leaves_no_journal_and_a_shutdown_keeps_it(
    tokenizer: Tokenizer, running: Any, tmp_path: Path
):
    folder = tmp_path / "a"
    async with running(ScriptedEngine(["one"], tokenizer=tokenizer), folder) as client:
        await client.open()
        await client.say([user("q")])
    assert [path.name for path in folder.glob("*.journal")] == ["s.journal"]
    async with running(ScriptedEngine([]), folder, client) as client:
        assert (await client.http.delete(f"{client.url}/sessions/s", headers=client.auth)).status_code == 204
        assert list(folder.glob("*.journal")) == []


async def test_the_key_of_a_session_is_not_written(tokenizer: Tokenizer, running: Any, tmp_path: Path):
    async with running(ScriptedEngine([]), tmp_path / "a") as client:
        await client.open()
        key = client.auth["Authorization"].removeprefix("Bearer ")
        assert key.encode() not in (tmp_path / "a" / "s.journal").read_bytes()


async def test_a_deadline_counts_on_while_no_server_runs(tokenizer: Tokenizer, running: Any, tmp_path: Path):
    async with running(ScriptedEngine([]), tmp_path / "a") as client:
        await client.open(deadline_s=0.0)
    async with running(ScriptedEngine([]), tmp_path / "a", client) as client:
        response = await client.http.post(
            f"{client.url}/sessions/s/v1/chat/completions", json={"messages": [user("q")]}, headers=client.auth
        )
        assert response.status_code == 410


async def test_two_servers_do_not_share_a_state_folder(tokenizer: Tokenizer, running: Any, tmp_path: Path):
    async with running(ScriptedEngine([]), tmp_path / "a"):
        app = create_app(
            engine=ScriptedEngine([]),
            tokenizer=tokenizer,
            family="auto",
            model="m",
            max_context=9,
            state_dir=tmp_path / "a",
        )
        with pytest.raises(SessionError, match="belongs to a session server that runs"):
            async with app.router.lifespan_context(app):
                pass


async def test_sessions_of_another_tokenizer_are_left_alone(
    tokenizer: Tokenizer, running: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    async with running(ScriptedEngine([]), tmp_path / "a") as client:
        await client.open()
    app = create_app(
        engine=ScriptedEngine([]),
        tokenizer=tokenizer,
        family="tiny",
        model="m",
        max_context=9,
        state_dir=tmp_path / "a",
    )
    async with app.router.lifespan_context(app):
        pass
    assert "written with another tokenizer or family" in caplog.text
    assert (tmp_path / "a" / "s.journal").exists()


async def test_a_full_disk_costs_the_journal_and_not_the_turn(
    tokenizer: Tokenizer, running: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    async with running(ScriptedEngine(["one"], tokenizer=tokenizer), tmp_path / "a") as client:
        await client.open()
        journal = tmp_path / "a" / "s.journal"
        journal.unlink()
        journal.symlink_to("/dev/full")
        with caplog.at_level(logging.WARNING):
            assert (await client.say([user("q")]))["content"] == "one"
        assert caplog.text.count("is written no further") == 1
        assert len(await client.trajectories()) == 1
