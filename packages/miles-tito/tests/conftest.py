"""A small byte-level ChatML tokenizer, real ones where they are at hand, and servers on free ports."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tarfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from miles_tito.engine.generation import Engine
from miles_tito.records import Sampling
from miles_tito.server import create_app, serve
from miles_tito.tokens.tokenizer import Tokenizer, load_tokenizer

sys.path.insert(0, str(Path(__file__).parent))  # importlib mode adds nothing by itself

from small_tokenizer import CHATML, write_tokenizer

SHARED = Path(__file__).resolve().parents[4] / "shared"


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write_tokenizer(tmp_path_factory.mktemp("chatml")))


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The real Qwen3 tokenizer and template."""
    archive = SHARED / "data" / "tokenizers" / "qwen3.tar.xz"
    if not archive.exists():
        pytest.skip(f"{archive.name} is not at hand")
    folder = tmp_path_factory.mktemp("qwen3")
    with tarfile.open(archive) as tar:
        tar.extraction_filter = getattr(tarfile, "data_filter", None)  # before 3.11.4 there is none
        tar.extractall(folder)
    return load_tokenizer(folder / "qwen3")


@contextlib.asynccontextmanager
async def served(app: Any) -> AsyncIterator[str]:
    """`app` on a free port, until the block ends."""
    url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(serve(app, ready=url.set_result))
    try:
        await asyncio.wait({url, task}, return_when=asyncio.FIRST_COMPLETED)
        yield url.result() if url.done() else await task or ""
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


class Chat:
    """A chat client with one open session, as an agent would be."""

    def __init__(self, url: str, http: httpx.AsyncClient, opened: dict[str, Any]) -> None:
        self.server = url
        self.http = http
        self.id: str = opened["session_id"]
        self.url: str = opened["base_url"]
        self.auth = {"Authorization": f"Bearer {opened['api_key']}"}

    async def post(
        self, messages: list[dict[str, Any]], *, headers: dict[str, str] | None = None, **fields: Any
    ) -> httpx.Response:
        return await self.http.post(
            f"{self.url}/chat/completions",
            json={"messages": messages, **fields},
            headers={**self.auth, **(headers or {})},
        )

    async def say(self, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        response = await self.post(messages, **fields)
        assert response.status_code == 200, response.text
        return response.json()

    async def reply(self, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        """The assistant message, as a client would append it."""
        return (await self.say(messages, **fields))["choices"][0]["message"]


OpenChat = Callable[..., contextlib.AbstractAsyncContextManager[Chat]]


@pytest.fixture
def open_chat(tokenizer: Tokenizer) -> OpenChat:
    """A server in front of an engine with one open session."""

    @contextlib.asynccontextmanager
    async def opened(
        engine: Engine,
        *,
        session_id: str = "s",
        sampling: dict[str, Any] | None = None,
        deadline_s: float | None = None,
        tok: Tokenizer = tokenizer,
        family: str = "auto",
        max_context: int = 4096,
        **server: Any,
    ) -> AsyncIterator[Chat]:
        app = create_app(
            engine=engine,
            tokenizer=tok,
            family=family,
            model="policy",
            max_context=max_context,
            default_sampling=Sampling(max_tokens=256),
            **server,
        )
        async with served(app) as url, httpx.AsyncClient(trust_env=False, timeout=30) as http:
            body = {"session_id": session_id, "sampling": sampling, "deadline_s": deadline_s}
            response = await http.post(f"{url}/sessions", json=body)
            assert response.status_code == 201, response.text
            yield Chat(url, http, response.json())

    return opened


@pytest.fixture(name="write_tokenizer")
def write_tokenizer_fixture() -> Callable[..., Path]:
    """Writes a tokenizer folder, see `write_tokenizer`."""
    return write_tokenizer


@pytest.fixture
def chatml() -> str:
    """The chat template of the small tokenizer."""
    return CHATML


@pytest.fixture(name="served")
def served_fixture() -> Callable[[Any], contextlib.AbstractAsyncContextManager[str]]:
    """Serves an application on a free port."""
    return served
