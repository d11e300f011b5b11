"""Chat messages: checked and brought to one form, and compared the way clients replay them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec

from miles_tito.errors import RequestError
from miles_tito.records import Message

from .images import read_part

_encode = msgspec.json.Encoder().encode

ROLES = ("system", "user", "assistant", "tool")
_FIELDS = {
    "system": {"name"},
    "user": {"name"},
    "assistant": {"name", "tool_calls", "reasoning_content"},
    "tool": {"name", "tool_call_id"},
}


def normalize(messages: Any) -> list[Message]:
    """OpenAI chat messages in one form: text content as a string, tool arguments parsed, empty extras left out.

    Raises:
        RequestError: a message cannot be rendered exactly; names it and the field.
    """
    if not isinstance(messages, list) or not messages:
        raise RequestError("`messages` must be a non-empty list.", code="invalid_messages", param="messages")
    return [_normalize(message, f"messages[{i}]") for i, message in enumerate(cast("list[Any]", messages))]


def message_key(message: Message) -> bytes:
    """What two spellings of one normalized message share.

    Tool arguments count as parsed JSON (1.0 equals 1, key order is free), an assistant's text without the whitespace
    around it. Call ids do not count, and neither does reasoning: clients drop it, see `reasoning_agrees`.
    """
    role = message["role"]
    if role == "assistant":
        calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls", [])]
        plain: Any = [role, message["content"].strip(), _canonical(calls) if calls else []]
    else:
        images = [[image["at"], image["digest"]] for image in message.get("images", [])]
        plain = [role, message["content"], message.get("name"), *([images] if images else [])]
    return _encode(plain)


def call_prefix(rid: str) -> str:
    """What the tool calls of a turn are named by, in letters that every dialect allows."""
    return f"call_{rid.rpartition('-')[2]}"


def value_key(value: Any) -> bytes:
    """A digest of plain data that ignores key order and how numbers are spelled."""
    return hashlib.blake2b(msgspec.json.encode(_canonical(value)), digest_size=16).digest()


def reasoning_agrees(replayed: Message, recorded: Message) -> bool:
    """Whether the reasoning of a replayed assistant message is absent or the recorded one, up to whitespace."""
    reasoning = replayed.get("reasoning_content", "").strip()
    return not reasoning or reasoning == recorded.get("reasoning_content", "").strip()


def _normalize(message: Any, where: str) -> Message:
    if not isinstance(message, dict):
        raise _invalid(f"{where} is a {type(message).__name__}, not an object.", where)
    given = cast("dict[str, Any]", message)
    role, content = given.get("role"), given.get("content")
    if len(given) == 2 and isinstance(content, str) and role in ("user", "assistant", "system"):
        return given  # as most messages of a long history are
    fields = {k: v for k, v in given.items() if v is not None and v != []}
    role = fields.pop("role", None)
    role = "system" if role == "developer" else role
    if role not in ROLES:
        raise _invalid(f"{where} has role {role!r}; known: {', '.join(ROLES)} (and developer, read as system).", where)
    if "reasoning" in fields and role == "assistant":
        fields.setdefault("reasoning_content", fields.pop("reasoning"))
    fields.pop("cache_control", None)
    text, images = _content(fields.pop("content", ""), role, where)
    result: Message = {"role": role, "content": text, **({"images": images} if images else {})}
    unknown = sorted(set(fields) - _FIELDS[role])
    if unknown:
        raise _invalid(f"{where} has fields that no {role} message takes here: {', '.join(unknown)}.", where)
    for key in ("name", "tool_call_id", "reasoning_content"):
        if key in fields:
            if not isinstance(fields[key], str):
                raise _invalid(f"{where}.{key} must be a string, not a {type(fields[key]).__name__}.", where)
            result[key] = fields[key]
    if "tool_calls" in fields:
        result["tool_calls"] = [
            _tool_call(call, f"{where}.tool_calls[{i}]")
            for i, call in enumerate(_sequence(fields["tool_calls"], where))
        ]
    return result


def _content(content: Any, role: str, where: str) -> tuple[str, list[dict[str, Any]]]:
    """The text of a message, and its images with their places in it."""
    if isinstance(content, str):
        return content, []
    text, images = "", list[dict[str, Any]]()
    for i, part in enumerate(_sequence(content, where)):
        fields = cast("dict[str, Any]", part) if isinstance(part, dict) else {"type": type(part).__name__}
        if fields.get("type") == "text" and isinstance(fields.get("text"), str):
            text += fields["text"]
        elif fields.get("type") in ("image_url", "image") and role in ("user", "tool"):
            images.append(read_part(fields, len(text), f"{where}.content[{i}]"))
        else:
            raise RequestError(
                f"{where}.content[{i}] is a {fields.get('type')!r} part; {role} messages take text"
                f"{' and images' if role in ('user', 'tool') else ' parts only'}.",
                code="unsupported_content",
                param=f"{where}.content",
            )
    return text, images


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    function = cast("dict[str, Any]", call).get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(cast("dict[str, Any]", function).get("name"), str):
        raise _invalid(f"{where} is no function call with a name.", where)
    function = cast("dict[str, Any]", function)
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments or "{}")
        except msgspec.DecodeError as error:
            raise _invalid(f"{where}.function.arguments is no JSON: {error}. Got {arguments!r:.80}.", where) from error
    if not isinstance(arguments, dict):
        raise _invalid(f"{where}.function.arguments must be a JSON object, not {arguments!r:.80}.", where)
    result: dict[str, Any] = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    call_id = cast("dict[str, Any]", call).get("id")
    return result if call_id is None else {"id": str(call_id), **result}


def _sequence(value: Any, where: str) -> Sequence[Any]:
    if not isinstance(value, (list, tuple)):
        raise _invalid(f"{where} holds a {type(value).__name__} where a list or a string belongs.", where)
    return cast("Sequence[Any]", value)


def _invalid(text: str, where: str) -> RequestError:
    return RequestError(text, code="invalid_messages", param=where)


def _canonical(value: Any) -> Any:
    """Plain data with sorted keys and whole floats as integers: JavaScript clients write 1.0 as 1."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        pairs = cast("Mapping[str, Any]", value).items()
        return {key: _canonical(item) for key, item in sorted(pairs)}
    if isinstance(value, (list, tuple)):
        return [_canonical(item) for item in cast("Sequence[Any]", value)]
    return value
