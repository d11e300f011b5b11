"""A model that follows a script, behind the HTTP that a session server speaks."""

from __future__ import annotations

import inspect
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from json import dumps, loads

from miles_envs.chat import ConnectionPool
from miles_tito.records import Ctx, Prompt


@dataclass(frozen=True)
class Answer:
    """One HTTP answer."""

    status: int
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)

    async def read(self) -> bytes:
        return self.body


def answer(status: int, *, json: object = None, text: str = "") -> Answer:
    return Answer(status, dumps(json).encode() if json is not None else text.encode())


Reply = str | dict | Exception | Answer


class ScriptedModel:
    """Answers the n-th request with the n-th reply: text, a message, an error to raise, or a whole answer."""

    def __init__(self, replies: list[Reply | Callable[[dict], Reply]]) -> None:
        self.replies = list(replies)
        self.requests: list[dict] = []

    async def __call__(self, url: str, body: dict, headers: dict[str, str]) -> Answer:
        marks = {"authorization": headers.get("Authorization"), "retry": headers.get("x-stainless-retry-count")}
        self.requests.append({"url": url, **marks, **body})
        reply = self.replies[len(self.requests) - 1]
        if callable(reply):
            reply = reply(body)
        if inspect.isawaitable(reply):
            reply = await reply
        if isinstance(reply, Exception):
            raise reply
        return reply if isinstance(reply, Answer) else completion(reply)


class ScriptedPool(ConnectionPool):
    """A pool whose calls go to the model instead of into the network."""

    def __init__(self, model: ScriptedModel) -> None:
        super().__init__()
        self.model = model

    def _opened(self) -> ScriptedPool:
        return self

    @asynccontextmanager
    async def request(
        self, method: str, url: str, *, json: dict, headers: dict[str, str], data: None
    ) -> AsyncIterator[Answer]:
        assert method == "POST"
        yield await self.model(url, loads(dumps(json)), headers)


def completion(reply: str | dict, *, finish_reason: str | None = None) -> Answer:
    message = {"role": "assistant", "content": reply} if isinstance(reply, str) else {"role": "assistant", **reply}
    finish = finish_reason or ("tool_calls" if message.get("tool_calls") else "stop")
    return answer(200, json={"choices": [{"index": 0, "message": message, "finish_reason": finish}]})


def refusal(status: int, message: str, code: str | None = None) -> Answer:
    return answer(status, json={"error": {"message": message, "code": code}})


def calls(*named: tuple[str, str]) -> dict:
    """An assistant message that calls tools: (name, JSON arguments)."""
    tool_calls = [
        {"id": f"call_{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(named)
    ]
    return {"content": "", "tool_calls": tool_calls}


def ctx(*, seconds: float | None = None) -> Ctx:
    deadline = None if seconds is None else time.monotonic() + seconds
    return Ctx(run_id="run", episode_id="g0/3", deadline=deadline)


def question(text: str = "2+2?", *, label: object = "4", id: str = "p") -> Prompt:
    return Prompt(id=id, messages=({"role": "user", "content": text},), task={"label": label})


def said(text: str) -> list[dict]:
    return [{"role": "user", "content": "?"}, {"role": "assistant", "content": text}]
