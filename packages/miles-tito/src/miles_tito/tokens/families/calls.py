"""Blocks of tool calls, as each family writes them, to names and arguments.

A reader gets what stands between the marks of its `CallFormat`. It returns None for anything that is not exactly a
block of calls: a malformed call is text, never a guess.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec

from .base import CallFormat, CallShape, Schemas, ToolCall

Calls = Sequence[ToolCall] | None


def read_json(text: str, schemas: Schemas) -> Calls:
    """`{"name": …, "arguments": {…}}`, as Hermes and Qwen3 write it."""
    call = _named(json_value(text), "arguments")
    return call and [call]


def read_json_list(text: str, schemas: Schemas) -> Calls:
    """`[{"name": …, "arguments": {…}}, …]` or `name[ARGS]{…}`, the two forms of Mistral."""
    if text.lstrip().startswith("["):
        value = json_value(text)
        calls = [_named(item, "arguments", optional=("id",)) for item in cast("list[Any]", value)] if value else []
    else:
        calls = [_compact(part) for part in text.split("[TOOL_CALLS]")]
    return _all(calls)


def read_parameters(text: str, schemas: Schemas) -> Calls:
    """`{"name": …, "parameters": {…}}`, as Llama 3 writes it."""
    call = _named(json_value(text), "parameters")
    return call and [call]


def read_function(text: str, schemas: Schemas) -> Calls:
    """`<function=f><parameter=a>…</parameter></function>`, as Qwen3.5 and Nemotron 3 write it."""
    return _xml_block(text, schemas, _FUNCTION, _FUNCTION_PARAMETER, trim_lines=True)


def read_invoke(text: str, schemas: Schemas) -> Calls:
    """`<invoke name="f"><parameter name="a">…</parameter></invoke>`, as MiniMax writes it."""
    return _xml_block(text, schemas, _INVOKE, _INVOKE_PARAMETER)


def read_dsml(text: str, schemas: Schemas) -> Calls:
    """`<｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="true">…`, as DeepSeek writes it from V3.2 on."""
    return _all([_dsml_call(name, body) for name, body in _blocks(text, _DSML_INVOKE) or []])


def read_pairs(text: str, schemas: Schemas) -> Calls:
    """`f<arg_key>a</arg_key><arg_value>…</arg_value>`, as GLM writes it."""
    name, mark, rest = text.partition("<arg_key>")
    name = name.strip()
    pairs = _blocks(mark + rest, _PAIR) if mark else []
    if not _NAME.fullmatch(name) or pairs is None:
        return None
    arguments = {key.strip(): _typed(value, schemas.get(name), key.strip()) for key, value in pairs}
    return [ToolCall(name, arguments)] if len(arguments) == len(pairs) else None


def read_kimi(text: str, schemas: Schemas) -> Calls:
    """`<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{…}<|tool_call_end|>…`."""
    return _all([_kimi_call(native.strip(), body) for native, body in _blocks(text, _KIMI) or []])


def read_deepseek(text: str, schemas: Schemas) -> Calls:
    """`<｜tool▁call▁begin｜>f<｜tool▁sep｜>{…}<｜tool▁call▁end｜>…` (V3.1), or with a type and a fence (V3, R1)."""
    return _all([_deepseek_call(head, body) for head, body in _blocks(text, _DEEPSEEK) or []])


HERMES = CallFormat(
    open="<tool_call>",
    close="</tool_call>",
    read=read_json,
    shape=CallShape(begin='<tool_call>\n{"name": "NAME", "arguments": ', end="}\n</tool_call>"),
)
FUNCTION = CallFormat(
    open="<tool_call>",
    close="</tool_call>",
    read=read_function,
    shape=CallShape(begin="<tool_call>\n<function=NAME>\n", end="\n</function>\n</tool_call>", style="qwen_xml"),
)
PAIRS = CallFormat(
    open="<tool_call>",
    close="</tool_call>",
    read=read_pairs,
    shape=CallShape(begin="<tool_call>NAME\n", end="\n</tool_call>", style="glm_xml"),
)

_NAME = re.compile(r"[^\s<>{}\"]+")
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)</function>", re.DOTALL)
_FUNCTION_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>(.*?)</parameter>", re.DOTALL)
_INVOKE = re.compile(r"\s*<invoke name=\"?([^\">\n]+)\"?>(.*?)</invoke>", re.DOTALL)
_INVOKE_PARAMETER = re.compile(r"\s*<parameter name=\"?([^\">\n]+)\"?>(.*?)</parameter>", re.DOTALL)
_DSML_INVOKE = re.compile(r"\s*<｜DSML｜invoke name=\"([^\"\n]+)\">(.*?)</｜DSML｜invoke>", re.DOTALL)
_DSML_PARAMETER = re.compile(r"\s*<｜DSML｜parameter ([^>\n]*)>(.*?)</｜DSML｜parameter>", re.DOTALL)
_DSML_ATTRIBUTES = re.compile(r"name=\"([^\"]+)\" string=\"(true|false)\"")
_PAIR = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_KIMI = re.compile(r"\s*<\|tool_call_begin\|>(.*?)<\|tool_call_argument_begin\|>(.*?)<\|tool_call_end\|>", re.DOTALL)
_KIMI_ID = re.compile(r"(?:functions\.)?([^\s:]+):\d+")
_DEEPSEEK = re.compile(r"\s*<｜tool▁call▁begin｜>(.*?)<｜tool▁sep｜>(.*?)<｜tool▁call▁end｜>", re.DOTALL)
_FENCED = re.compile(r"([^\n]+)\n```json\n(.*)\n```", re.DOTALL)


def json_value(text: str) -> Any:
    """The value of JSON text, None where it is none."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError):
        return None


def json_object(text: str) -> dict[str, Any] | None:
    """The object that JSON text is, None where it is none."""
    value = json_value(text)
    return cast("dict[str, Any]", value) if isinstance(value, dict) else None


def _named(value: Any, key: str, *, optional: Sequence[str] = ()) -> ToolCall | None:
    if not isinstance(value, dict):
        return None
    call = cast("dict[str, Any]", value)
    name, arguments = call.get("name"), call.get(key, {})
    if not isinstance(name, str) or not name or not isinstance(arguments, dict) or set(call) - {"name", key, *optional}:
        return None
    native = call.get("id")
    return ToolCall(name, cast("dict[str, Any]", arguments), native if isinstance(native, str) else None)


def _compact(text: str) -> ToolCall | None:
    name, mark, arguments = text.partition("[ARGS]")
    name, _, native = name.partition("[CALL_ID]")
    value = json_object(arguments)
    return (
        ToolCall(name.strip(), value, native.strip() or None) if mark and name.strip() and value is not None else None
    )


def _all(calls: Sequence[ToolCall | None]) -> Calls:
    whole = [call for call in calls if call is not None]
    return whole if whole and len(whole) == len(calls) else None


def _blocks(text: str, pattern: re.Pattern[str]) -> list[tuple[str, str]] | None:
    """What `pattern` finds one behind the other; None where something else stands between or nothing is found."""
    found: list[tuple[str, str]] = []
    at = 0
    while match := pattern.match(text, at):
        found.append((match[1], match[2]))
        at = match.end()
    return None if text[at:].strip() or not found else found


def _dsml_call(name: str, body: str) -> ToolCall | None:
    direct = json_object(body)
    if direct is not None:
        return ToolCall(name, direct)
    parameters = _blocks(body, _DSML_PARAMETER) if body.strip() else []
    arguments: dict[str, Any] = {}
    for attributes, value in parameters or []:
        match = _DSML_ATTRIBUTES.fullmatch(attributes)
        decoded = value if match and match[2] == "true" else json_value(value)
        if match is None or match[1] in arguments or (decoded is None and value.strip() != "null"):
            return None
        arguments[match[1]] = decoded
    return None if parameters is None else ToolCall(name, arguments)


def _kimi_call(native: str, body: str) -> ToolCall | None:
    name, arguments = _KIMI_ID.fullmatch(native), json_object(body)
    return None if name is None or arguments is None else ToolCall(name[1], arguments, native)


def _deepseek_call(head: str, body: str) -> ToolCall | None:
    fenced = _FENCED.fullmatch(body) if head == "function" else None
    name, text = (fenced[1], fenced[2]) if fenced else (head.strip(), body)
    arguments = json_object(text)
    return ToolCall(name, arguments) if name and arguments is not None else None


def _xml_block(
    text: str, schemas: Schemas, block: re.Pattern[str], parameter: re.Pattern[str], *, trim_lines: bool = False
) -> Calls:
    calls: list[ToolCall | None] = []
    for name, body in _blocks(text, block) or []:
        pairs = _blocks(body, parameter) if body.strip() else []
        values = [(key, _one_line_less(value) if trim_lines else value) for key, value in pairs or []]
        arguments = {key: _typed(value, schemas.get(name), key) for key, value in values}
        is_whole = pairs is not None and len(arguments) == len(pairs)
        calls.append(ToolCall(name, arguments) if is_whole else None)
    return _all(calls)


def _one_line_less(value: str) -> str:
    """`value` without the line breaks that the format puts around it."""
    return value.removeprefix("\n").removesuffix("\n")


def _typed(value: str, schema: Mapping[str, Any] | None, key: str) -> Any:
    """A value written without quotes, as the tool's schema types it; text where the schema says none.

    Text that does not read as its type stays text: the tool then says what is wrong with it.
    """
    properties = cast("Mapping[str, Any]", (schema or {}).get("properties") or {})
    kinds = _kinds(properties.get(key))
    if not kinds or "string" in kinds:
        return None if "null" in kinds and value.strip() == "null" else value
    lowered = value.strip()
    if "boolean" in kinds and lowered in ("True", "False"):
        return lowered == "True"
    if "null" in kinds and lowered == "None":
        return None
    decoded = json_value(lowered)
    return value if decoded is None and lowered != "null" else decoded


def _kinds(schema: Any) -> set[str]:
    """The JSON types that a schema allows; none where it does not say."""
    if not isinstance(schema, Mapping):
        return set()
    field = cast("Mapping[str, Any]", schema)
    kind = field.get("type")
    kinds = {kind} if isinstance(kind, str) else set(cast("list[str]", kind)) if isinstance(kind, list) else set[str]()
    for key in ("anyOf", "oneOf"):
        for option in cast("list[Any]", field.get(key) or []):
            kinds |= _kinds(option)
    if not kinds and isinstance(field.get("enum"), list):
        kinds |= {"string" for item in cast("list[Any]", field["enum"]) if isinstance(item, str)}
    return kinds
