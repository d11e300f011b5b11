"""What all dialects share: a request as the session takes it, and the writer of its answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from miles_tito.errors import RequestError
from miles_tito.records import FinishReason, Message, Sampling
from miles_tito.tokens.constrained_output import Form
from miles_tito.tokens.families.parser import Piece, TextPiece, ToolCall
from miles_tito.tokens.messages import call_prefix


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRequest:
    """A request for one model call, read from any dialect; `LiveSession.start` serves it."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] | None = None
    """In OpenAI's form; None where the request names none, so that the session's own count."""
    variables: Mapping[str, Any]
    """Of the chat template."""
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    stream: bool = False
    form: Form | None = None
    """What the reply must look like, where the request forces it."""
    wants_logprobs: bool = False
    """Whether the answer holds the log-probability of each sampled token."""
    pinned: tuple[str, ...] = ()
    """Fields that asked for something else than the session serves."""
    left_out: tuple[str, ...] = ()
    """Tools that the client lists and only its own service could run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenUsage:
    """Tokens of one turn."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledToken:
    """One token of a reply with its log-probability, for requests that ask for them."""

    text: str
    data: bytes
    """Its bytes, which may be a part of a character."""
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a turn ended, for the last part of its answer."""

    finish: FinishReason
    stop_string: str | None
    usage: TokenUsage
    tokens: tuple[SampledToken, ...] | None = None
    """All that was sampled, marks and end token among them, where the request wants log-probs."""


class AnswerWriter(ABC):
    """Writes one answer in its dialect, whole or in server-sent events; `TurnAnswer` calls it."""

    def __init__(self, rid: str) -> None:
        self._rid = rid
        self._num_calls = 0

    @abstractmethod
    def whole(self, reply: Message, ending: Ending) -> bytes:
        """The answer in one body."""

    @abstractmethod
    def opening(self) -> bytes:
        """The first events."""

    def pieces(self, pieces: Sequence[Piece]) -> bytes:
        """Events for what was sampled since."""
        return b"".join(self._call(piece) if isinstance(piece, ToolCall) else self._text(piece) for piece in pieces)

    def ping(self) -> bytes:
        """A sign of life that changes nothing: a comment."""
        return b": still at work\n\n"

    @abstractmethod
    def closing(self, ending: Ending) -> bytes:
        """The last events."""

    @abstractmethod
    def failure(self, problem: RequestError) -> bytes:
        """An error after the stream began."""

    @abstractmethod
    def _text(self, piece: TextPiece) -> bytes: ...

    @abstractmethod
    def _call(self, call: ToolCall) -> bytes: ...

    def _next_call_id(self) -> str:
        """The name of the turn's next tool call."""
        self._num_calls += 1
        return call_id(self._rid, self._num_calls - 1)


NewWriter = Callable[[str, str, TokenUsage], AnswerWriter]
"""From the turn's request id, the model's name and the prompt's tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """One API that clients speak; the routes of agents are served with one each."""

    read: Callable[[bytes, Sampling, str], tuple[TurnRequest, NewWriter]]
    """From a body, the session's sampling and its model's name to the request and what makes the writer of its answer;
    raises RequestError where it is malformed, or asks for what this server does not do."""
    error: Callable[[RequestError], dict[str, Any]]
    """The body of an answer that says no."""


def openai_error(problem: RequestError) -> dict[str, Any]:
    """An error in OpenAI's shape."""
    kinds = {401: "authentication_error", 404: "not_found_error", 409: "conflict_error"}
    kind = kinds.get(problem.status, "invalid_request_error" if problem.status < 500 else "server_error")
    return {"error": {"message": str(problem), "type": kind, "param": problem.param, "code": problem.code}}


def event(data: Mapping[str, Any], name: str | None = None) -> bytes:
    """One server-sent event."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + msgspec.json.encode(data) + b"\n\n"


def call_id(rid: str, index: int) -> str:
    """The name of a turn's tool call."""
    return f"{call_prefix(rid)}_{index}"
