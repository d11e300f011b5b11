"""A reply whose form the request forces: JSON of a schema, or calls of tools.

The engine enforces it through a grammar (SGLang's `structural_tag`, read by xgrammar), which cuts off what would not
fit. What comes is a sample of that narrower distribution, and so are its log-probs: the turn is context, not training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from miles_tito.errors import RequestError
from miles_tito.records import Message

from .families.base import CallShape, Family, Schemas

_LINE_BREAKS = {"type": "regex", "pattern": "\\n{0,2}"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """What the reply to a request is forced to be: JSON of a schema, or tool calls."""

    param: str
    """The field of the request that asked for it."""
    schema: Mapping[str, Any] | None = None
    """Of the JSON that the reply is; None where the reply is calls."""
    names: tuple[str, ...] = ()
    """Tools that may be called; empty: all that the request lists."""
    one: bool = False
    """One call and no more."""

    @property
    def key(self) -> str:
        """Equal for forms that force the same."""
        return msgspec.json.encode([self.schema, self.names, self.one], order="deterministic").decode()


def is_kept(form: Form, reply: Message) -> bool:
    """Whether a reply that ended by itself has the form; an engine that takes no grammar would give any."""
    if form.schema is None:
        return bool(reply.get("tool_calls"))
    try:
        msgspec.json.decode(reply["content"])
    except msgspec.DecodeError:
        return False
    return True


def structural_tag(form: Form, family: Family, schemas: Schemas, *, in_reasoning: bool) -> str:
    """`form` as JSON text for the engine.

    Args:
        schemas: parameters of the request's tools, by name.
        in_reasoning: the prompt ended inside a reasoning mark.

    Raises:
        RequestError: the family's format cannot be forced, or the tools do not fit.
    """
    if family.channels:
        raise _refused(form, f"The replies of family {family.name} come on channels, and their form cannot be forced.")
    if form.schema is not None:
        if schemas:
            raise _refused(form, 'A reply is JSON or may call tools, not both. Add "tool_choice": "none".')
        elements = [_json(form.schema)]
    else:
        elements = _calls(form, family, schemas)
    tag = {
        "type": "structural_tag",
        "format": {"type": "sequence", "elements": _thought(family, in_reasoning) + elements},
    }
    return msgspec.json.encode(tag).decode()


def _calls(form: Form, family: Family, schemas: Schemas) -> list[Any]:
    shape = family.tool_call.shape if family.tool_call else None
    if shape is None:
        raise _refused(form, f"Tool calls of family {family.name} cannot be forced. Let the model choose.")
    unknown = [name for name in form.names if name not in schemas]
    if unknown or not schemas:
        raise _refused(form, f"There is no tool {unknown[0]!r:.80}." if unknown else "There is no tool to call.")
    tags = [_tag(shape, name, schemas[name]) for name in form.names or schemas]
    calls = {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": shape.separator,
        "at_least_one": True,
        "stop_after_first": form.one or not family.parallel_calls,
    }
    return [*_text(shape.before), calls, *_text(shape.after)]


def _tag(shape: CallShape, name: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    content = {**_json(schema or {"type": "object"}), "style": shape.style}
    return {"type": "tag", "begin": shape.begin.replace("NAME", name), "content": content, "end": shape.end}


def _json(schema: Mapping[str, Any]) -> dict[str, Any]:
    # Models that are not sure of a value may write blanks for ever.
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": 2}


def _thought(family: Family, in_reasoning: bool) -> list[Any]:
    """Reasoning in front of the form, where the family has it: as free as always."""
    if family.reasoning is None:
        return []
    begin, end = family.reasoning
    thought = {"type": "tag", "begin": "" if in_reasoning else begin, "content": {"type": "any_text"}, "end": end}
    whole = {"type": "sequence", "elements": [thought, _LINE_BREAKS]}
    return [whole if in_reasoning else {"type": "optional", "content": whole}]


def _text(text: str) -> list[Any]:
    return [{"type": "const_string", "value": text}] if text else []


def _refused(form: Form, text: str) -> RequestError:
    return RequestError(f"`{form.param}`: {text}", code="unsupported_parameter", param=form.param)
