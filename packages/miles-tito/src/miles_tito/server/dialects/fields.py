"""What the requests of all dialects share. They are Structs, read strictly: what would go unheard is refused by name.

The Structs are also the schemas of `GET /openapi.json`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar, cast, get_type_hints

import msgspec

from miles_tito.errors import RequestError
from miles_tito.records import Sampling
from miles_tito.tokens.constrained_output import Form

S = TypeVar("S", bound=msgspec.Struct)
Positive = Annotated[int, msgspec.Meta(ge=1)]
NonEmpty = Annotated[str, msgspec.Meta(min_length=1)]


def only(*values: Any, hint: str | None = None) -> msgspec.Meta:
    """Of a field whose other values would change what is sampled or recorded: those that change nothing."""
    return msgspec.Meta(extra_json_schema={"enum": list(values)}, extra={"only": values}, description=hint)


def hint(text: str) -> msgspec.Meta:
    """What is served of a field: in the document, and in the answer to whoever sent something else."""
    return msgspec.Meta(description=text)


class AgentRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of a request for one model call; each dialect has a child of it."""

    model: str | None = None
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None

    def pinned(self, limit: int | None, limit_field: str, sampling: Sampling, model: str) -> list[str]:
        """The fields that ask for something else than the session serves."""
        keys = ("temperature", "top_p", "top_k", "min_p", "seed")
        asked = {key: value for key in keys if (value := getattr(self, key, None)) is not None}
        pinned = [key for key, value in asked.items() if value != getattr(sampling, key)]
        if limit is not None and limit > sampling.max_tokens:
            pinned.append(limit_field)
        if self.model not in (None, model):
            pinned.append("model")
        return pinned


class ReplyFormat(msgspec.Struct):
    """What a reply must be; chat completions wrap the schema once more, in `json_schema`."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    schema: dict[str, Any] | None = None
    json_schema: dict[str, Any] | None = None

    def form(self, param: str) -> Form | None:
        """None for plain text; `param` is the field's name, for messages."""
        match self.type:
            case "text":
                return None
            case "json_object":
                return Form(param=param, schema={"type": "object"})
            case "json_schema":
                schema = (self.json_schema or {}).get("schema", self.schema)
                if not isinstance(schema, dict):
                    raise wrong(f"{param}.schema", schema, "a JSON schema")
                return Form(param=param, schema=cast("dict[str, Any]", schema))


class FunctionChoice(msgspec.Struct):
    """The one function that the model is to call; chat completions wrap its name in `function`."""

    type: Literal["function"]
    name: str | None = None
    function: dict[str, Any] | None = None


ToolChoice = Literal["auto", "none", "required"] | FunctionChoice
CHOICES = hint("Only auto, none, required or one function is served.")
FORMATS = hint("Only text, json_object and json_schema are served.")


def call_form(choice: ToolChoice | None, *, one: bool) -> Form | None:
    """The calls that OpenAI's `tool_choice` forces; None where it forces none.

    Args:
        one: whether the request allows one call only.
    """
    if isinstance(choice, FunctionChoice):
        name = (choice.function or {}).get("name", choice.name)
        if not isinstance(name, str):
            raise wrong("tool_choice.name", name, "a string")
        return Form(param="tool_choice", names=(name,), one=True)
    return Form(param="tool_choice", one=one) if choice == "required" else None


def one_form(*forms: Form | None) -> Form | None:
    """The form among `forms`; at most one can be forced."""
    found = [form for form in forms if form]
    if len(found) > 1:
        raise refused(found[0].param, f"It cannot be forced together with `{found[1].param}`.")
    return found[0] if found else None


def check_parallel(parallel: bool, form: Form | None) -> None:
    """Refuse one call at a time where calls are the model's own choice."""
    if not parallel and (form is None or form.schema is not None):
        raise refused(
            "parallel_tool_calls",
            "The model may call several tools where it chooses to. Leave it out, or force the call by `tool_choice`.",
        )


def function(name: str, description: Any, parameters: dict[str, Any] | None) -> dict[str, Any]:
    """A tool in OpenAI's form."""
    described = {} if description is None else {"description": description}
    return {"type": "function", "function": {"name": name, **described, "parameters": parameters or {}}}


def join_texts(parts: Sequence[dict[str, Any]]) -> Any:
    """Neighbouring texts as one, each on a line of its own; a plain string where there is nothing else."""
    joined: list[dict[str, Any]] = []
    for part in parts:
        if part["type"] == "text" and joined and joined[-1]["type"] == "text":
            before = joined[-1]["text"]
            gap = "" if not before or before.endswith("\n") else "\n"
            joined[-1] = {"type": "text", "text": f"{before}{gap}{part['text']}"}
        else:
            joined.append(part)
    if not joined:
        return ""
    return joined[0]["text"] if len(joined) == 1 and joined[0]["type"] == "text" else joined


def read_object(body: bytes) -> dict[str, Any]:
    """The fields of a JSON object, those that are null left out.

    Raises:
        RequestError: it is none.
    """
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"The body is no JSON: {error}.", code="invalid_json") from error
    if not isinstance(fields, dict):
        raise RequestError("The body must be a JSON object.", code="invalid_json")
    return {key: value for key, value in cast("dict[str, Any]", fields).items() if value is not None}


def as_struct(given: dict[str, Any], cls: type[S]) -> S:
    """The fields of a request, checked.

    Raises:
        RequestError: one is unknown, or has a value that is not served; it is named.
    """
    metas = _metas(cls)
    for key, value in given.items():
        meta = metas.get(key)
        if meta and meta.extra and value not in meta.extra["only"]:
            shown = " or ".join(map(dumps, meta.extra["only"]))
            raise refused(key, f"Only {shown} is served, got {value!r:.80}. {meta.description or ''}".strip())
    unknown = sorted(set(given) - set(cls.__struct_fields__))
    if unknown:
        raise refused(unknown[0], f"Fields that are not served here: {', '.join(unknown)}. Leave them out.")
    try:
        return msgspec.convert(given, cls)
    except (msgspec.ValidationError, RecursionError) as error:
        text, _, path = str(error).partition(" - at `$")
        where = path.strip("`.") or "".join(re.findall(r"field `(\w+)`", text))
        param = where.partition(".")[0].partition("[")[0]
        served = (metas[param].description if param in metas else None) or ""
        message = f"`{where}`: {text.removesuffix('.')}. {served}".strip()
        raise RequestError(message, code="invalid_value", param=param) from error


def refused(param: str, text: str) -> RequestError:
    return RequestError(f"`{param}`: {text}", code="unsupported_parameter", param=param)


def wrong(param: str, value: Any, wanted: str) -> RequestError:
    return RequestError(f"`{param}` must be {wanted}, got {value!r:.80}.", code="invalid_value", param=param)


def dumps(value: Any) -> str:
    """`value` as JSON text."""
    return msgspec.json.encode(value).decode()


@functools.cache
def _metas(cls: type[msgspec.Struct]) -> dict[str, msgspec.Meta]:
    """What `only` and `hint` say of a Struct's fields."""
    hints = get_type_hints(cls, include_extras=True)
    return {name: meta for name, type_ in hints.items() for meta in getattr(type_, "__metadata__", ())}
