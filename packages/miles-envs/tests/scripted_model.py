"""A model that follows a script, behind the HTTP that a session server speaks."""

from __future__ import annotations

import inspect
import json
import time
from collections.abc import Callable

import httpx
from miles_tito.records import Ctx, Prompt

Reply = str | dict | Exception | httpx.Response


class ScriptedModel:
    """Answers the n-th request with the n-th reply: text, a message, an error to raise, or a whole response."""

    def __init__(self, replies: list[Reply | Callable[[dict], Reply]]) -> None:
        self.replies = list(replies)
        self.requests: list[dict] = []

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        self.requests.append({"url": str(request.url), "authorization": request.headers.get("authorization"), **body})
        reply = self.replies[len(self.requests) - 1]
        if callable(reply):
            reply = reply(body)
        if inspect.isawaitable(reply):
            reply = await reply
        if isinstance(reply, Exception):
            raise reply
        return reply if isinstance(reply, httpx.Response) else completion(reply)


def completion(reply: str | dict, *, finish_reason: str | None = None) -> httpx.Response:
    message = {"role": "assistant", "content": reply} if isinstance(reply, str) else {"role": "assistant", **reply}
    finish = finish_reason or ("tool_calls" if message.get("tool_calls") else "stop")
    return httpx.Response(200, json={"choices": [{"index": 0, "message": message, "finish_reason": finish}]})


def refusal(status: int, message: str, code: str | None = None) -> httpx.Response:
    return httpx.Response(status, json={"error": {"message": message, "code": code}})


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
