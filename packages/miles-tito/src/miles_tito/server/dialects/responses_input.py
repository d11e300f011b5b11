"""The input items and tools of OpenAI responses, as chat messages and functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from miles_tito.errors import RequestError

from . import fields
from .parts import join_texts

_SERVICE_TOOLS = ("web_search", "web_search_preview")
"""Tools that clients list always and their model's own service runs; a model that cannot search is told of none."""


class Names:
    """Functions inside namespaces, under the one name that the model sees."""

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


def read_tools(given: Mapping[str, Any]) -> tuple[tuple[Mapping[str, Any], ...] | None, Names, tuple[str, ...]]:
    """The tools as OpenAI functions, their names, and the types of those left out."""
    names = Names()
    functions: list[Mapping[str, Any]] = []
    left_out: list[str] = []
    for tool in fields.sequence(given, "tools"):
        tool = fields.item(tool, "tools")
        match tool.get("type"):
            case "function":
                functions.append(_function(tool, None, names))
            case "namespace":
                namespace = fields.text(tool, "name", "tools")
                inner = [fields.item(t, "tools") for t in fields.sequence(tool, "tools")]
                functions += [_function(t, namespace, names) for t in inner]
            case kind if kind in _SERVICE_TOOLS:
                left_out.append(f"tools.{kind}")
            case kind:
                raise fields.refused("tools", f"Only function and namespace tools are served, got {kind!r:.80}.")
    return (tuple(functions) if "tools" in given else None), names, tuple(left_out)


def read_input(given: Mapping[str, Any], names: Names) -> list[dict[str, Any]]:
    """All messages, OpenAI chat's form."""
    messages: list[dict[str, Any]] = []
    if "instructions" in given:
        messages.append({"role": "system", "content": fields.text(given, "instructions", "instructions")})
    asked = given.get("input")
    if isinstance(asked, str):
        return [*messages, {"role": "user", "content": asked}]
    if not isinstance(asked, list):
        raise fields.wrong("input", asked, "a string or a list of items")
    for i, value in enumerate(fields.sequence(given, "input")):
        _add_item(messages, fields.item(value, f"input[{i}]"), names, f"input[{i}]")
    return messages


def _function(tool: Mapping[str, Any], namespace: str | None, names: Names) -> dict[str, Any]:
    if tool.get("type", "function") != "function":
        raise fields.refused("tools", f"A namespace holds functions here, not {tool['type']!r:.80}.")
    function = {
        "name": names.add(namespace, fields.text(tool, "name", "tools")),
        **({"description": tool["description"]} if "description" in tool else {}),
        "parameters": fields.mapping(tool, "parameters"),
    }
    return {"type": "function", "function": function}


def _add_item(messages: list[dict[str, Any]], item: dict[str, Any], names: Names, where: str) -> None:
    match item.get("type", "message"):
        case "message":
            role, content = item.get("role"), _content(item.get("content", ""), where)
            if role == "assistant":
                if not isinstance(content, str):
                    raise fields.wrong(f"{where}.content", content, "text in an assistant message")
                _reply(messages)["content"] += content
            else:
                messages.append({"role": role, "content": content})
        case "reasoning":
            text = "".join(_texts(item, "content", where)) or "".join(_texts(item, "summary", where))
            reply = _reply(messages, fresh=True)
            reply["reasoning_content"] = text
        case "function_call":
            name = names.join(item.get("namespace"), fields.text(item, "name", where))
            function = {"name": name, "arguments": item.get("arguments", "{}")}
            _reply(messages)["tool_calls"].append({"id": item.get("call_id"), "type": "function", "function": function})
        case "function_call_output":
            output = _content(item.get("output", ""), where)
            messages.append({"role": "tool", "content": output, "tool_call_id": item.get("call_id")})
        case kind:
            raise RequestError(
                f"{where} is a {kind!r} item; served are message, reasoning, function_call and function_call_output.",
                code="unsupported_content",
                param=where,
            )


def _reply(messages: list[dict[str, Any]], *, fresh: bool = False) -> dict[str, Any]:
    """The assistant message that an item belongs to; `fresh`: one that has nothing yet."""
    last = messages[-1] if messages else {}
    if last.get("role") == "assistant" and not (fresh and (last["content"] or last["tool_calls"])):
        return last
    messages.append({"role": "assistant", "content": "", "tool_calls": []})
    return messages[-1]


def _content(content: Any, where: str) -> Any:
    if isinstance(content, str):
        return content
    return join_texts([_part(fields.item(p, where), where) for p in fields.sequence({"content": content}, "content")])


def _part(part: Mapping[str, Any], where: str) -> dict[str, Any]:
    match part.get("type"):
        case "input_text" | "output_text" | "text":
            return {"type": "text", "text": fields.text(part, "text", where)}
        case "input_image":
            return {"type": "image_url", "image_url": {"url": part.get("image_url")}}
        case kind:
            raise RequestError(
                f"{where} holds a {kind!r} part; this model takes text and images.",
                code="unsupported_content",
                param=where,
            )


def _texts(item: Mapping[str, Any], key: str, where: str) -> Sequence[str]:
    return [fields.text(fields.item(part, where), "text", where) for part in fields.sequence(item, key)]
