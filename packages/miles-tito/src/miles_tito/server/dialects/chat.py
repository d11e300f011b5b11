"""OpenAI chat completions: requests read strictly, answers whole or as server-sent events."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec

from miles_tito.errors import RequestError
from miles_tito.records import FinishReason, Message, Sampling
from miles_tito.tokens.families.parser import Piece, ToolCall
from miles_tito.tokens.messages import normalize

from . import fields
from .base import (
    PING,
    AnswerWriter,
    Ending,
    SampledToken,
    TurnRequest,
    Usage,
    call_id,
    event,
    openai_error,
)
from .demands import call_form, check_parallel, json_form, one_form

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "top_logprobs": (0,),
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
_HINTS = {
    "n": "Send one request a reply; each is recorded as a branch of its own.",
    "top_logprobs": "`logprobs` gives those of the sampled tokens.",
}
_NO_EFFECT = ("user", "metadata", "safety_identifier", "prompt_cache_key")
"""Labels for the operator's own bookkeeping; they never change an answer."""
_READ = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "model", "messages", "tools", "stream", "stream_options"),
    *("max_tokens", "max_completion_tokens", "stop", "stop_token_ids", "chat_template_kwargs"),
    *("logprobs", "response_format", "tool_choice", "parallel_tool_calls"),
)


class ChatDialect:
    """`POST /v1/chat/completions`."""

    def read(self, body: bytes, *, sampling: Sampling, model: str) -> tuple[TurnRequest, AnswerWriter]:
        """See `Dialect.read`."""
        given = fields.read_object(body)
        fields.refuse_others(given, read=_READ, neutral=_NEUTRAL, no_effect=_NO_EFFECT, hints=_HINTS)
        limits = [fields.integer(given, key, at_least=1) for key in ("max_tokens", "max_completion_tokens")]
        max_tokens = min((limit for limit in limits if limit is not None), default=None)
        options = fields.mapping(given, "stream_options")
        if set(options) - {"include_usage"}:
            raise fields.refused("stream_options", f"Only `include_usage` is known, got {sorted(options)}.")
        pinned = fields.pinned_fields(
            given, sampling=sampling, model=model, max_tokens=max_tokens, max_tokens_field="max_tokens"
        )
        one_call = not fields.boolean(given, "parallel_tool_calls", default=True)
        form = one_form(
            json_form(fields.mapping(given, "response_format"), "response_format", nested="json_schema"),
            call_form(given.get("tool_choice"), one=one_call, nested="function"),
        )
        check_parallel(given, form)
        request = TurnRequest(
            messages=tuple(normalize(given.get("messages"))),
            tools=read_tools(given),
            variables=fields.mapping(given, "chat_template_kwargs"),
            max_tokens=max_tokens,
            stop=fields.strings(given, "stop"),
            stop_token_ids=fields.token_ids(given, "stop_token_ids"),
            stream=fields.boolean(given, "stream"),
            form=form,
            wants_logprobs=fields.boolean(given, "logprobs"),
            pinned=(*pinned, *fields.strict_tools(given)),
        )
        return request, ChatWriter(include_usage=fields.boolean(options, "include_usage"))

    def error(self, problem: RequestError) -> bytes:
        """See `Dialect.error`."""
        return msgspec.json.encode(openai_error(problem))


class ChatWriter:
    """Writes `chat.completion` objects; see `AnswerWriter`."""

    def __init__(self, *, include_usage: bool) -> None:
        self._include_usage = include_usage
        self._num_calls = 0

    def start(self, *, rid: str, model: str, usage: Usage) -> None:
        self._rid = rid
        self._base = {"id": f"chatcmpl-{rid}", "created": int(time.time()), "model": model}

    def whole(self, reply: Message, ending: Ending) -> bytes:
        calls = [
            {**call, "function": {**call["function"], "arguments": fields.dumps(call["function"]["arguments"])}}
            for call in reply.get("tool_calls", [])
        ]
        message: dict[str, Any] = {"role": "assistant", "content": reply["content"] or (None if calls else "")}
        if "reasoning_content" in reply:
            message["reasoning_content"] = reply["reasoning_content"]
        if calls:
            message["tool_calls"] = calls
        choice = {
            "index": 0,
            "message": message,
            "logprobs": _logprobs(ending.tokens),
            "finish_reason": str(ending.finish),
        }
        return msgspec.json.encode(
            {**self._base, "object": "chat.completion", "choices": [choice], "usage": _usage(ending.usage)}
        )

    def opening(self) -> bytes:
        return self._event([_choice({"role": "assistant", "content": ""}, None)])

    def pieces(self, pieces: Sequence[Piece]) -> bytes:
        return b"".join(self._event([_choice(self._delta(piece), None)]) for piece in pieces)

    def ping(self) -> bytes:
        return PING

    def closing(self, ending: Ending) -> bytes:
        # All at once: what was sampled is known token by token, what the client sees piece by piece.
        last = self._event([{**_choice({}, ending.finish), "logprobs": _logprobs(ending.tokens)}])
        if self._include_usage:
            last += self._event([], usage=_usage(ending.usage))
        return last + b"data: [DONE]\n\n"

    def failure(self, problem: RequestError) -> bytes:
        return event(openai_error(problem))

    def _delta(self, piece: Piece) -> dict[str, Any]:
        if not isinstance(piece, ToolCall):
            return {"reasoning_content" if piece.kind == "reasoning" else "content": piece.text}
        index = self._num_calls
        self._num_calls += 1
        function = {"name": piece.name, "arguments": piece.arguments_json}
        call = {"index": index, "id": call_id(self._rid, index), "type": "function", "function": function}
        return {"tool_calls": [call]}

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        return event({**self._base, "object": "chat.completion.chunk", "choices": choices, **more})


def _choice(delta: dict[str, Any], finish: FinishReason | None) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish and str(finish)}


def _logprobs(tokens: Sequence[SampledToken] | None) -> dict[str, Any] | None:
    if tokens is None:
        return None
    rows = [{"token": t.text, "logprob": t.logprob, "bytes": list(t.data), "top_logprobs": []} for t in tokens]
    return {"content": rows, "refusal": None}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def read_tools(given: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...] | None:
    """The functions under `tools`, none where the model shall call none, None where the field is absent.

    Raises:
        RequestError: they are none, or not only functions.
    """
    tools = fields.sequence(given, "tools")
    for tool in tools:
        tool = fields.item(tool, "tools")
        if tool.get("type", "function") != "function":
            raise fields.refused("tools", f"Only function tools are served, got {tool['type']!r:.80}.")
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(cast("dict[str, Any]", function).get("name"), str):
            raise fields.wrong("tools", tool, 'objects like {"type": "function", "function": {"name": …}}')
        fields.mapping(cast("dict[str, Any]", function), "parameters")
    if given.get("tool_choice") == "none":
        return ()
    return tuple(tools) if "tools" in given else None
