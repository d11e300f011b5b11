"""A thin OpenAI chat client for agents: one call a turn, and errors that say whose fault they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, cast

import httpx
from miles_tito.records import Message, Policy

from .errors import ContextExceeded, InfraError

CONTEXT_CODES = ("context_length_exceeded",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One answer of the model."""

    message: Message
    """As it goes back into the conversation: role, content, tool calls, reasoning."""
    finish_reason: str
    """`stop`, `tool_calls` or `length`."""
    usage: Mapping[str, Any]

    @property
    def text(self) -> str:
        return self.message.get("content") or ""

    @property
    def tool_calls(self) -> Sequence[Mapping[str, Any]]:
        return self.message.get("tool_calls") or ()

    @property
    def is_truncated(self) -> bool:
        """The turn ran out of tokens."""
        return self.finish_reason == "length"


def connection_pool(*, timeout_s: float = 600.0) -> httpx.AsyncClient:
    """Connections for any number of chat clients on one event loop; close it with `aclose`.

    Args:
        timeout_s: longest silence of the server. A busy engine answers late, so it is long; an episode's deadline is
            what ends a slow turn.
    """
    return httpx.AsyncClient(
        timeout=httpx.Timeout(timeout_s, connect=10.0, pool=None),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=60.0),
        trust_env=False,  # sessions are local; a proxy from the environment would swallow them
    )


class ChatClient:
    """Talks to the session that `policy` describes.

    ```python
    async with ChatClient(policy) as chat:
        answer = await chat.complete([{"role": "user", "content": "17+25=?"}])
    ```
    """

    def __init__(self, policy: Policy, *, pool: httpx.AsyncClient | None = None) -> None:
        """
        Args:
            pool: connections shared with other clients, from `connection_pool`; without one the client has its own.
        """
        self._policy = policy
        self._pool = pool or connection_pool()
        self._owns_pool = pool is None

    async def complete(self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] = ()) -> Completion:
        """The model's answer to `messages`, sampled as the policy says.

        Raises:
            InfraError: the session cannot be reached, or answers with an error.
            ContextExceeded: the messages leave no room for an answer.
        """
        sampling = self._policy.sampling
        body: dict[str, Any] = {
            "model": self._policy.model,
            "messages": list(messages),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": sampling.max_tokens,
        }
        if tools:
            body["tools"] = list(tools)
        url = f"{self._policy.base_url.rstrip('/')}/chat/completions"
        try:
            response = await self._pool.post(
                url, json=body, headers={"Authorization": f"Bearer {self._policy.api_key}"}
            )
        except httpx.HTTPError as error:
            raise InfraError(f"No answer from {url}: {type(error).__name__}: {error}") from error
        if response.status_code != 200:
            raise _refusal(response, url)
        return _read(response, url)

    async def aclose(self) -> None:
        """Close the connections that are the client's own."""
        if self._owns_pool:
            await self._pool.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


def _refusal(response: httpx.Response, url: str) -> InfraError | ContextExceeded:
    """The error that an answer other than 200 means."""
    message, code = response.text[:300], None
    try:
        problem = response.json()["error"]
        message, code = str(problem["message"]), problem.get("code")
    except (ValueError, KeyError, TypeError, AttributeError):
        pass  # not OpenAI's shape: the text itself is the message
    if code in CONTEXT_CODES:
        return ContextExceeded(message)
    return InfraError(f"{url} answered {response.status_code}: {message}", status=response.status_code)


def _read(response: httpx.Response, url: str) -> Completion:
    try:
        body = response.json()
        choice = body["choices"][0]
        message = cast("Message", choice["message"])
        finish = str(choice["finish_reason"])
        role = message["role"]
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise InfraError(f"{url} answered no chat completion: {response.text[:300]}", status=200) from error
    if finish not in ("stop", "tool_calls", "length"):
        raise InfraError(f"{url} ended the turn with finish_reason {finish!r}: the answer is not whole.", status=200)
    kept = {key: message[key] for key in ("content", "tool_calls", "reasoning_content") if message.get(key)}
    return Completion(
        message={"role": role, "content": "", **kept}, finish_reason=finish, usage=body.get("usage") or {}
    )
