"""OpenAI responses: answers whole or as server-sent events.

response.created ─▶ in_progress ─▶ (output_item.added ─▶ … deltas … ─▶ output_item.done) … ─▶ completed | incomplete
"""

from __future__ import annotations

import time
from typing import Any

import msgspec

from miles_tito.errors import RequestError
from miles_tito.records import FinishReason, Message
from miles_tito.tokens.families.parser import TextPiece, ToolCall, pieces_of

from . import fields
from .base import AnswerWriter, Ending, TokenUsage, event


class ToolNames:
    """The functions of a request, those inside namespaces too, under the one name each that the model sees."""

    def __init__(self) -> None:
        self._split: dict[str, tuple[str | None, str]] = {}
        self._joined: dict[tuple[str | None, str], str] = {}

    def add(self, namespace: str | None, name: str) -> str:
        """The model's name for a function: its own, unless another namespace has the same."""
        joined = f"{namespace}__{name}" if namespace and name in self._split else name
        if joined in self._split:
            raise fields.refused("tools", f"Two tools are called {joined!r:.80}.")
        self._split[joined] = (namespace, name)
        self._joined[namespace, name] = joined
        return joined

    def join(self, namespace: str | None, name: str) -> str:
        """The model's name for a function that a client repeats."""
        return self._joined.get((namespace, name), name)

    def split(self, joined: str) -> tuple[str | None, str]:
        """The client's namespace and name for a function that the model called."""
        return self._split.get(joined, (None, joined))


class ResponsesWriter(AnswerWriter):
    """Writes `response` objects; implements `AnswerWriter`."""

    def __init__(self, rid: str, model: str, usage: TokenUsage, *, names: ToolNames) -> None:
        super().__init__(rid)
        self._names = names
        self._items: list[dict[str, Any]] = []
        """Finished output items."""
        self._open: dict[str, Any] | None = None
        """The item that is being written, and its text so far."""
        self._so_far = ""
        self._sequence = -1
        self._response: dict[str, Any] = {
            "id": f"resp_{rid}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "error": None,
            "incomplete_details": None,
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
        }

    def whole(self, reply: Message, ending: Ending) -> bytes:
        self.pieces(pieces_of(reply))
        self._close()
        return msgspec.json.encode(self._final(ending))

    def opening(self) -> bytes:
        response: dict[str, Any] = {**self._response, "status": "in_progress", "output": [], "usage": None}
        return self._event("created", response=response) + self._event("in_progress", response=response)

    def closing(self, ending: Ending) -> bytes:
        last = self._close()
        final = self._final(ending)
        return last + self._event(final["status"], response=final)

    def failure(self, problem: RequestError) -> bytes:
        error = {"code": problem.code, "message": str(problem)}
        response: dict[str, Any] = {
            **self._response,
            "status": "failed",
            "output": self._items,
            "usage": None,
            "error": error,
        }
        return self._event("failed", response=response)

    def _final(self, ending: Ending) -> dict[str, Any]:
        cut = ending.finish is FinishReason.LENGTH
        return {
            **self._response,
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": self._items,
            "usage": _usage(ending.usage),
        }

    def _text(self, piece: TextPiece) -> bytes:
        opened = b""
        if self._open is None or self._open["type"] != _ITEM_TYPES[piece.kind]:
            opened = self._close() + self._open_text(piece.kind)
        self._so_far += piece.text
        return opened + self._part_event("delta", delta=piece.text, **_logprobs(piece.kind))

    def _open_text(self, kind: str) -> bytes:
        index = len(self._items)
        item: dict[str, Any] = {"type": _ITEM_TYPES[kind], "status": "in_progress"}
        item |= (
            {"id": f"rs_{self._rid}_{index}", "summary": []}
            if kind == "reasoning"
            else {
                "id": f"msg_{self._rid}_{index}",
                "role": "assistant",
            }
        )
        self._open, self._so_far = {**item, "content": []}, ""
        added = self._event("output_item.added", output_index=index, item=self._open)
        return added + self._item_event("content_part.added", part=_part(kind, ""))

    def _close(self) -> bytes:
        item = self._open
        if item is None:
            return b""
        kind = "reasoning" if item["type"] == "reasoning" else "content"
        part = _part(kind, self._so_far)
        done = self._part_event("done", text=self._so_far, **_logprobs(kind))
        done += self._item_event("content_part.done", part=part)
        finished = {**item, "content": [part], "status": "completed"}
        self._open = None
        return done + self._finish(finished)

    def _call(self, call: ToolCall) -> bytes:
        closed = self._close()
        namespace, name = self._names.split(call.name)
        index = len(self._items)
        item = {
            "id": f"fc_{self._rid}_{index}",
            "type": "function_call",
            "call_id": self._next_call_id(),
            "name": name,
            **({"namespace": namespace} if namespace else {}),
        }
        place = {"output_index": index, "item_id": item["id"]}
        arguments = call.arguments_json
        started = {**item, "arguments": "", "status": "in_progress"}
        return (
            closed
            + self._event("output_item.added", output_index=index, item=started)
            + self._event("function_call_arguments.delta", **place, delta=arguments)
            + self._event("function_call_arguments.done", **place, arguments=arguments)
            + self._finish({**item, "arguments": arguments, "status": "completed"})
        )

    def _finish(self, item: dict[str, Any]) -> bytes:
        self._items.append(item)
        return self._event("output_item.done", output_index=len(self._items) - 1, item=item)

    def _part_event(self, name: str, **data: Any) -> bytes:
        assert self._open is not None
        kind = "reasoning_text" if self._open["type"] == "reasoning" else "output_text"
        return self._item_event(f"{kind}.{name}", **data)

    def _item_event(self, name: str, **data: Any) -> bytes:
        assert self._open is not None
        place = {"output_index": len(self._items), "item_id": self._open["id"], "content_index": 0}
        return self._event(name, **place, **data)

    def _event(self, name: str, **data: Any) -> bytes:
        self._sequence += 1
        kind = f"response.{name}"
        return event({"type": kind, "sequence_number": self._sequence, **data}, kind)


_ITEM_TYPES = {"reasoning": "reasoning", "content": "message"}


def _part(kind: str, text: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _logprobs(kind: str) -> dict[str, Any]:
    return {} if kind == "reasoning" else {"logprobs": []}


def _usage(usage: TokenUsage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
