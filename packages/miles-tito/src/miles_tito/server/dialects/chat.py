"""OpenAI chat completions: requests read strictly, answers whole or as server-sent events."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

import msgspec

from miles_tito.errors import RequestError
from miles_tito.records import FinishReason, Message, Sampling
from miles_tito.tokens.families.parser import TextPiece, ToolCall
from miles_tito.tokens.messages import normalize

from . import fields
from .base import (
    AnswerWriter,
    Dialect,
    Ending,
    NewWriter,
    SampledToken,
    TokenUsage,
    TurnRequest,
    event,
    openai_error,
)

_MESSAGES = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"role": {"enum": ["system", "user", "assistant", "tool"]}, "content": {"type": "string"}},
        "required": ["role", "content"],
    },
}


class ChatFunction(msgspec.Struct):
    """The function of a `ChatTool`."""

    name: str
    description: Any = None
    parameters: dict[str, Any] = {}
    """JSON schema."""
    strict: Any = None


class ChatTool(msgspec.Struct):
    """A tool in OpenAI's form, which chat templates take as it came."""

    function: ChatFunction
    type: Annotated[Any, msgspec.Meta(extra_json_schema={"enum": ["function"]})] = "function"
    strict: Any = None

    def __post_init__(self) -> None:
        if self.type != "function":
            raise ValueError(f"Only function tools are served, got {self.type!r:.80}")


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool = False


class ChatRequest(fields.AgentRequest, kw_only=True):
    """Body of `POST /v1/chat/completions`."""

    messages: Annotated[Any, msgspec.Meta(extra_json_schema=_MESSAGES)]
    """Read by `tokens.messages.normalize`."""
    tools: list[ChatTool] | None = None
    tool_choice: Annotated[fields.ToolChoice | None, fields.CHOICES] = None
    parallel_tool_calls: bool = True
    response_format: Annotated[fields.ReplyFormat | None, fields.FORMATS] = None
    max_tokens: fields.Positive | None = None
    max_completion_tokens: fields.Positive | None = None
    stop: fields.NonEmpty | tuple[fields.NonEmpty, ...] = ()
    stop_token_ids: tuple[Annotated[int, msgspec.Meta(ge=0, lt=2**31)], ...] = ()
    top_k: float | None = None
    min_p: float | None = None
    seed: float | None = None
    stream_options: StreamOptions = StreamOptions()
    chat_template_kwargs: dict[str, Any] | None = None
    logprobs: bool = False
    n: Annotated[Any, fields.only(1, hint="Send one request a reply; each is recorded as a branch of its own.")] = None
    frequency_penalty: Annotated[Any, fields.only(0)] = None
    presence_penalty: Annotated[Any, fields.only(0)] = None
    repetition_penalty: Annotated[Any, fields.only(1)] = None
    logit_bias: Annotated[Any, fields.only({})] = None
    top_logprobs: Annotated[Any, fields.only(0, hint="`logprobs` gives those of the sampled tokens.")] = None
    modalities: Annotated[Any, fields.only(["text"])] = None
    service_tier: Annotated[Any, fields.only("auto", "default")] = None
    store: Annotated[Any, fields.only(False)] = None
    ignore_eos: Annotated[Any, fields.only(False)] = None
    min_tokens: Annotated[Any, fields.only(0)] = None
    add_generation_prompt: Annotated[Any, fields.only(True)] = None
    continue_final_message: Annotated[Any, fields.only(False)] = None
    separate_reasoning: Annotated[Any, fields.only(True)] = None
    user: Any = None
    """This and the next three are labels for the operator's own bookkeeping; they never change an answer."""
    metadata: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None


class ChatWriter(AnswerWriter):
    """Writes `chat.completion` objects; implements `AnswerWriter`."""

    def __init__(self, rid: str, model: str, usage: TokenUsage, *, include_usage: bool) -> None:
        super().__init__(rid)
        self._include_usage = include_usage
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

    def closing(self, ending: Ending) -> bytes:
        # All at once: what was sampled is known token by token, what the client sees piece by piece.
        last = self._event([{**_choice({}, ending.finish), "logprobs": _logprobs(ending.tokens)}])
        if self._include_usage:
            last += self._event([], usage=_usage(ending.usage))
        return last + b"data: [DONE]\n\n"

    def failure(self, problem: RequestError) -> bytes:
        return event(openai_error(problem))

    def _text(self, piece: TextPiece) -> bytes:
        return self._event(
            [_choice({"reasoning_content" if piece.kind == "reasoning" else "content": piece.text}, None)]
        )

    def _call(self, call: ToolCall) -> bytes:
        index = self._num_calls
        function = {"name": call.name, "arguments": call.arguments_json}
        part = {"index": index, "id": self._next_call_id(), "type": "function", "function": function}
        return self._event([_choice({"tool_calls": [part]}, None)])

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        return event({**self._base, "object": "chat.completion.chunk", "choices": choices, **more})


def _choice(delta: dict[str, Any], finish: FinishReason | None) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish and str(finish)}


def _logprobs(tokens: Sequence[SampledToken] | None) -> dict[str, Any] | None:
    if tokens is None:
        return None
    rows = [{"token": t.text, "logprob": t.logprob, "bytes": list(t.data), "top_logprobs": []} for t in tokens]
    return {"content": rows, "refusal": None}


def _usage(usage: TokenUsage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def read_request(body: bytes, sampling: Sampling, model: str) -> tuple[TurnRequest, NewWriter]:
    """See `Dialect.read`."""
    given = fields.read_object(body)
    asked = fields.as_struct({"messages": [], **given}, ChatRequest)
    limits = [limit for limit in (asked.max_tokens, asked.max_completion_tokens) if limit is not None]
    max_tokens = min(limits, default=None)
    form = fields.one_form(
        asked.response_format.form("response_format") if asked.response_format else None,
        fields.call_form(asked.tool_choice, one=not asked.parallel_tool_calls),
    )
    fields.check_parallel(asked.parallel_tool_calls, form)
    strict = any(tool.strict is True or tool.function.strict is True for tool in asked.tools or ())
    request = TurnRequest(
        messages=tuple(normalize(asked.messages)),
        tools=() if asked.tool_choice == "none" else tuple(given["tools"]) if "tools" in given else None,
        variables=asked.chat_template_kwargs or {},
        max_tokens=max_tokens,
        stop=(asked.stop,) if isinstance(asked.stop, str) else asked.stop,
        stop_token_ids=asked.stop_token_ids,
        stream=asked.stream,
        form=form,
        wants_logprobs=asked.logprobs,
        pinned=(*asked.pinned(max_tokens, "max_tokens", sampling, model), *(["tools.strict"] if strict else [])),
    )
    return request, partial(ChatWriter, include_usage=asked.stream_options.include_usage)


CHAT = Dialect(read=read_request, error=openai_error)
