"""A thin OpenAI chat client for agents: one call a turn; a full context and a broken server are different errors."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, cast

from miles_tito.records import Message, Policy
from miles_tito.shared.http import Http, NoAnswer

from .errors import ContextExceeded, InfraError

CONTEXT_CODES = ("context_length_exceeded",)
RETRY_FOR_S = 120.0
"""Longer than a session server takes to come back at its address."""
RETRY_HEADER = "x-stainless-retry-count"
"""How OpenAI's own clients mark a repeated call; the session server joins it to the first one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One answer of the model, as `ChatClient.complete` returns it."""

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


class ConnectionPool(Http):
    """Connections that any number of chat clients of one event loop share; whoever makes it closes it."""

    def __init__(self, *, timeout_s: float = 600.0) -> None:
        """
        Args:
            timeout_s: longest silence of the server. A busy engine answers late, so it is long; an episode's deadline
                is what ends a slow turn.
        """
        super().__init__(silence_s=timeout_s, max_connections=0, keepalive_s=60.0)
        self.closed = False

    async def close(self) -> None:
        """Close idle and open connections."""
        self.closed = True
        await super().aclose()

    async def aclose(self) -> None:
        await self.close()


def connection_pool(*, timeout_s: float = 600.0) -> ConnectionPool:
    """A pool for `ChatClient`; arguments as for `ConnectionPool`."""
    return ConnectionPool(timeout_s=timeout_s)


class ChatClient:
    """Calls the model through the session of one episode; an agent makes one from the `policy` that it is given.

    ```python
    async with ChatClient(policy) as chat:
        answer = await chat.complete([{"role": "user", "content": "17+25=?"}])
    ```
    """

    def __init__(self, policy: Policy, *, pool: ConnectionPool | None = None, retry_for_s: float = RETRY_FOR_S) -> None:
        """
        Args:
            pool: connections shared with other clients, from `connection_pool`; without one the client has its own.
            retry_for_s: how long a call is sent again after a broken connection. A session server that comes back has
                the conversation, and answers the repeated call with what it had recorded, or samples it then.
        """
        self._policy = policy
        self._retry_for_s = retry_for_s
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
            answer = await self._pool.call(
                "POST",
                url,
                json=body,
                headers={"Authorization": f"Bearer {self._policy.api_key}"},
                retry_for_s=self._retry_for_s,
                retry_header=RETRY_HEADER,
            )
        except NoAnswer as error:
            raise InfraError(f"No answer from {url}: {error.reason}") from error
        if answer.status != 200:
            raise _refusal(answer.status, answer.body, url)
        return _read(answer.body, url)

    async def aclose(self) -> None:
        """Close the connections that are the client's own."""
        if self._owns_pool:
            await self._pool.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


def _refusal(status: int, content: bytes, url: str) -> InfraError | ContextExceeded:
    """The error that an answer other than 200 means."""
    message, code = _excerpt(content), None
    try:
        problem = json.loads(content)["error"]
        message, code = str(problem["message"]), problem.get("code")
    except (ValueError, KeyError, TypeError, AttributeError):
        pass  # not OpenAI's shape: the text itself is the message
    if code in CONTEXT_CODES:
        return ContextExceeded(message)
    return InfraError(f"{url} answered {status}: {message}", status=status)


def _excerpt(content: bytes) -> str:
    return content[:300].decode(errors="replace")


def _read(content: bytes, url: str) -> Completion:
    try:
        body = json.loads(content)
        choice = body["choices"][0]
        message = cast("Message", choice["message"])
        finish = str(choice["finish_reason"])
        role = message["role"]
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise InfraError(f"{url} answered no chat completion: {_excerpt(content)}", status=200) from error
    if finish not in ("stop", "tool_calls", "length"):
        raise InfraError(f"{url} ended the turn with finish_reason {finish!r}: the answer is not whole.", status=200)
    kept = {key: message[key] for key in ("content", "tool_calls", "reasoning_content") if message.get(key)}
    return Completion(
        message={"role": role, "content": "", **kept}, finish_reason=finish, usage=body.get("usage") or {}
    )
