"""Forms that requests force, as each dialect writes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from miles_tito.tokens.constrained_output import Form

from . import fields


def json_form(given: Mapping[str, Any], param: str, *, nested: str = "") -> Form | None:
    """The JSON that a format object asks for; None where it is plain text.

    Args:
        param: the object's name, for messages.
        nested: the field that holds name and schema, where they do not lie in the object itself.
    """
    match given.get("type", "text"):
        case "text":
            return None
        case "json_object":
            return Form(param=param, schema={"type": "object"})
        case "json_schema":
            holder = fields.mapping(given, nested) if nested else given
            schema = holder.get("schema")
            if not isinstance(schema, dict):
                raise fields.wrong(f"{param}.schema", schema, "a JSON schema")
            return Form(param=param, schema=cast("dict[str, Any]", schema))
        case kind:
            raise fields.refused(param, f"Only text, json_object and json_schema are served, got {kind!r:.80}.")


def call_form(choice: Any, *, one: bool, nested: str = "") -> Form | None:
    """The calls that OpenAI's `tool_choice` forces; None where it forces none.

    Args:
        one: whether the request allows one call only.
        nested: the field that holds the name, where it does not lie in the object itself.
    """
    if choice in (None, "auto", "none"):
        return None
    if choice == "required":
        return Form(param="tool_choice", one=one)
    named = cast("dict[str, Any]", choice) if isinstance(choice, dict) else {}
    if named.get("type") == "function":
        holder = fields.mapping(named, nested) if nested else named
        return Form(param="tool_choice", names=(fields.text(holder, "name", "tool_choice"),), one=True)
    raise fields.refused("tool_choice", f"Only auto, none, required or one function is served, got {choice!r:.80}.")


def one_form(*forms: Form | None) -> Form | None:
    """The form among `forms`; at most one can be forced."""
    found = [form for form in forms if form]
    if len(found) > 1:
        raise fields.refused(found[0].param, f"It cannot be forced together with `{found[1].param}`.")
    return found[0] if found else None


def check_parallel(given: Mapping[str, Any], form: Form | None) -> None:
    """Refuse one call at a time where calls are the model's own choice."""
    if given.get("parallel_tool_calls") is False and (form is None or form.schema is not None):
        raise fields.refused(
            "parallel_tool_calls",
            "The model may call several tools where it chooses to. Leave it out, or force the call by `tool_choice`.",
        )
