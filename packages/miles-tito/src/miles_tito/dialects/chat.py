"""OpenAI chat completions: requests read strictly, answers whole or as server-sent events."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgspec

from miles_tito.errors import RequestError
from miles_tito.families.parser import Piece, ToolCall
from miles_tito.messages import normalize
from miles_tito.records import FinishReason, Message, Sampling

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "parallel_tool_calls": (True,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "ignore_eos": (False,),
    "min_tokens": (0,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "separate_reasoning": (True,),
}
"""Fields whose other values would change what is sampled or recorded, with the values that change nothing."""
_NEUTRAL_HINT = {
    "n": "Send one request a reply; each is recorded as a branch of its own.",
    "logprobs": "Log-probs are recorded in the session; read them from its trajectories.",
}
_NO_EFFECT = {"user", "metadata", "safety_identifier", "prompt_cache_key"}
"""Labels for the operator's own bookkeeping; they never change an answer."""
_PINNED = ("temperature", "top_p", "top_k", "min_p", "seed")
_READ = {
    *_PINNED,
    *("model", "messages", "tools", "stream", "stream_options", "max_tokens", "max_completion_tokens"),
    *("stop", "stop_token_ids", "chat_template_kwargs"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A chat request that can be served exactly."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...]
    variables: Mapping[str, Any]
    max_tokens: int | None
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    stream: bool
    include_usage: bool
    pinned: tuple[str, ...]
    """Fields that asked for something else than the session serves."""


def read_request(body: bytes, *, sampling: Sampling, model: str) -> ChatRequest:
    """The request in `body`.

    Raises:
        RequestError: it is malformed, or asks for what this server does not do.
    """
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"The body is no JSON: {error}.", code="invalid_json") from error
    if not isinstance(fields, dict):
        raise RequestError("The body must be a JSON object.", code="invalid_json")
    given = {key: value for key, value in cast("dict[str, Any]", fields).items() if value is not None}
    _refuse(given)
    max_tokens = [_integer(given, key, at_least=1) for key in ("max_tokens", "max_completion_tokens") if key in given]
    pinned = [key for key in _PINNED if key in given and _number(given, key) != getattr(sampling, key)]
    if max_tokens and min(max_tokens) > sampling.max_tokens:
        pinned.append("max_tokens")
    if given.get("model", model) != model:
        pinned.append("model")
    options = _object(given, "stream_options")
    if set(options) - {"include_usage"}:
        raise _refused("stream_options", f"Only `include_usage` is known, got {sorted(options)}.")
    return ChatRequest(
        messages=tuple(normalize(given.get("messages"))),
        tools=() if given.get("tool_choice") == "none" else _tools(given.get("tools", [])),
        variables=_object(given, "chat_template_kwargs"),
        max_tokens=min(max_tokens, default=None),
        stop=_strings(given.get("stop", [])),
        stop_token_ids=tuple(_integers(given.get("stop_token_ids", []))),
        stream=_boolean(given, "stream"),
        include_usage=_boolean(options, "include_usage"),
        pinned=tuple(pinned),
    )


def error_body(message: str, *, status: int, code: str, param: str | None = None) -> bytes:
    """An error in OpenAI's shape."""
    kind = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error"}
    error = {"message": message, "type": kind.get(status, "server_error"), "param": param, "code": code}
    return msgspec.json.encode({"error": error})


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def as_dict(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class ChatAnswer:
    """Writes one answer, whole or in events."""

    def __init__(self, *, rid: str, model: str, include_usage: bool) -> None:
        self._base = {"id": f"chatcmpl-{rid}", "created": int(time.time()), "model": model}
        self._rid = rid
        self._include_usage = include_usage
        self._num_calls = 0

    def whole(self, reply: Message, finish: FinishReason, usage: Usage) -> bytes:
        """The `chat.completion` object."""
        calls = [
            {
                "id": call["id"],
                "type": "function",
                "function": {**call["function"], "arguments": _json(call["function"]["arguments"])},
            }
            for call in reply.get("tool_calls", [])
        ]
        message: dict[str, Any] = {"role": "assistant", "content": reply["content"] or (None if calls else "")}
        if "reasoning_content" in reply:
            message["reasoning_content"] = reply["reasoning_content"]
        if calls:
            message["tool_calls"] = calls
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": str(finish)}
        return msgspec.json.encode(
            {**self._base, "object": "chat.completion", "choices": [choice], "usage": usage.as_dict()}
        )

    def opening(self) -> bytes:
        """The first event."""
        return self._event([self._choice({"role": "assistant", "content": ""}, None)])

    def pieces(self, pieces: Sequence[Piece]) -> bytes:
        """Events for what was sampled since."""
        return b"".join(self._event([self._choice(self._delta(piece), None)]) for piece in pieces)

    def closing(self, finish: FinishReason, usage: Usage) -> bytes:
        """The finish reason, the usage if it was asked for, and the end mark."""
        last = self._event([self._choice({}, str(finish))])
        if self._include_usage:
            last += self._event([], usage=usage.as_dict())
        return last + b"data: [DONE]\n\n"

    def failure(self, body: bytes) -> bytes:
        """An error after the stream began."""
        return b"data: " + body + b"\n\n"

    def _delta(self, piece: Piece) -> dict[str, Any]:
        if not isinstance(piece, ToolCall):
            return {"reasoning_content" if piece.kind == "reasoning" else "content": piece.text}
        index = self._num_calls
        self._num_calls += 1
        function = {"name": piece.name, "arguments": piece.arguments_json}
        call = {"index": index, "id": f"call_{self._rid}_{index}", "type": "function", "function": function}
        return {"tool_calls": [call]}

    def _choice(self, delta: dict[str, Any], finish: str | None) -> dict[str, Any]:
        return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        chunk = {**self._base, "object": "chat.completion.chunk", "choices": choices, **more}
        return b"data: " + msgspec.json.encode(chunk) + b"\n\n"


def _refuse(given: Mapping[str, Any]) -> None:
    for key, allowed in _NEUTRAL.items():
        if key in given and given[key] not in allowed:
            shown = " or ".join(_json(value) for value in allowed)
            raise _refused(key, f"Only {shown} is served, got {given[key]!r:.80}. {_NEUTRAL_HINT.get(key, '')}".strip())
    unknown = sorted(set(given) - _READ - set(_NEUTRAL) - _NO_EFFECT)
    if unknown:
        raise _refused(unknown[0], f"Fields that are not served here: {', '.join(unknown)}. Leave them out.")


def _refused(param: str, text: str) -> RequestError:
    return RequestError(f"`{param}`: {text}", code="unsupported_parameter", param=param)


def _wrong(param: str, value: Any, wanted: str) -> RequestError:
    return RequestError(f"`{param}` must be {wanted}, got {value!r:.80}.", code="invalid_value", param=param)


def _tools(value: Any) -> tuple[Mapping[str, Any], ...]:
    if not isinstance(value, list):
        raise _wrong("tools", value, "a list")
    for tool in cast("list[Any]", value):
        function = cast("dict[str, Any]", tool).get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(cast("dict[str, Any]", function).get("name"), str):
            raise _wrong("tools", tool, 'objects like {"type": "function", "function": {"name": …}}')
        if cast("dict[str, Any]", tool).get("type", "function") != "function":
            raise _refused("tools", f"Only function tools are served, got {cast('dict[str, Any]', tool)['type']!r}.")
    return tuple(cast("list[Mapping[str, Any]]", value))


def _strings(value: Any) -> tuple[str, ...]:
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(v, str) and v for v in cast("list[Any]", values)):
        raise _wrong("stop", value, "a non-empty string or a list of them")
    return tuple(cast("list[str]", values))


def _integers(value: Any) -> list[int]:
    if not isinstance(value, list) or not all(type(v) is int and v >= 0 for v in cast("list[Any]", value)):
        raise _wrong("stop_token_ids", value, "a list of token ids")
    return cast("list[int]", value)


def _integer(given: Mapping[str, Any], key: str, *, at_least: int) -> int:
    value = given[key]
    if type(value) is not int or value < at_least:
        raise _wrong(key, value, f"an integer of at least {at_least}")
    return value


def _number(given: Mapping[str, Any], key: str) -> float:
    value = given[key]
    if type(value) not in (int, float):
        raise _wrong(key, value, "a number")
    return value


def _boolean(given: Mapping[str, Any], key: str) -> bool:
    value = given.get(key, False)
    if not isinstance(value, bool):
        raise _wrong(key, value, "true or false")
    return value


def _object(given: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = given.get(key, {})
    if not isinstance(value, dict):
        raise _wrong(key, value, "an object")
    return cast("dict[str, Any]", value)


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
