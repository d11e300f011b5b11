"""Request bodies read strictly: what would go unheard is refused by name."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

import msgspec

from miles_tito.errors import RequestError
from miles_tito.records import Sampling


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


def refuse_others(
    given: Mapping[str, Any],
    *,
    read: Collection[str],
    neutral: Mapping[str, Sequence[Any]],
    no_effect: Collection[str],
    hints: Mapping[str, str] | None = None,
) -> None:
    """Refuse every field that is neither read, nor a label without effect, nor at a value that changes nothing."""
    for key, allowed in neutral.items():
        if key in given and given[key] not in allowed:
            shown = " or ".join(dumps(value) for value in allowed)
            hint = (hints or {}).get(key, "")
            raise refused(key, f"Only {shown} is served, got {given[key]!r:.80}. {hint}".strip())
    unknown = sorted(set(given) - set(read) - set(neutral) - set(no_effect))
    if unknown:
        raise refused(unknown[0], f"Fields that are not served here: {', '.join(unknown)}. Leave them out.")


def pinned_fields(
    given: Mapping[str, Any], *, sampling: Sampling, model: str, max_tokens: int | None, max_tokens_field: str
) -> list[str]:
    """The fields that ask for something else than the session serves."""
    keys = ("temperature", "top_p", "top_k", "min_p", "seed")
    pinned = [key for key in keys if key in given and number(given, key) != getattr(sampling, key)]
    if max_tokens is not None and max_tokens > sampling.max_tokens:
        pinned.append(max_tokens_field)
    if given.get("model", model) != model:
        pinned.append("model")
    return pinned


def strict_tools(given: Mapping[str, Any]) -> list[str]:
    """`tools.strict` where a tool asks that the arguments keep to its schema, which a session leaves to the model."""
    tools = [_object(tool) for tool in sequence(given, "tools")]
    inner = [
        item for tool in tools for item in (tool, _object(tool.get("function")), *map(_object, sequence(tool, "tools")))
    ]
    asked = any(item.get("strict") is True for item in inner)
    return ["tools.strict"] if asked else []


def _object(value: Any) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def refused(param: str, text: str) -> RequestError:
    return RequestError(f"`{param}`: {text}", code="unsupported_parameter", param=param)


def wrong(param: str, value: Any, wanted: str) -> RequestError:
    return RequestError(f"`{param}` must be {wanted}, got {value!r:.80}.", code="invalid_value", param=param)


def strings(given: Mapping[str, Any], key: str) -> tuple[str, ...]:
    value = given.get(key, [])
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(v, str) and v for v in cast("list[Any]", values)):
        raise wrong(key, value, "a non-empty string or a list of them")
    return tuple(cast("list[str]", values))


def token_ids(given: Mapping[str, Any], key: str) -> tuple[int, ...]:
    value = given.get(key, [])
    if not isinstance(value, list) or not all(type(v) is int and 0 <= v < 2**31 for v in cast("list[Any]", value)):
        raise wrong(key, value, "a list of token ids")
    return tuple(cast("list[int]", value))


def integer(given: Mapping[str, Any], key: str, *, at_least: int) -> int | None:
    value = given.get(key)
    if value is not None and (type(value) is not int or value < at_least):
        raise wrong(key, value, f"an integer of at least {at_least}")
    return value


def number(given: Mapping[str, Any], key: str) -> float:
    value = given[key]
    if type(value) not in (int, float):
        raise wrong(key, value, "a number")
    return value


def boolean(given: Mapping[str, Any], key: str, *, default: bool = False) -> bool:
    value = given.get(key, default)
    if not isinstance(value, bool):
        raise wrong(key, value, "true or false")
    return value


def mapping(given: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = given.get(key, {})
    if not isinstance(value, dict):
        raise wrong(key, value, "an object")
    return cast("dict[str, Any]", value)


def sequence(given: Mapping[str, Any], key: str) -> list[Any]:
    value = given.get(key, [])
    if not isinstance(value, list):
        raise wrong(key, value, "a list")
    return cast("list[Any]", value)


def item(value: Any, where: str) -> dict[str, Any]:
    """`value`, an object without its null fields; messages name it `where`."""
    if not isinstance(value, dict):
        raise wrong(where, value, "an object")
    return {key: field for key, field in cast("dict[str, Any]", value).items() if field is not None}


def text(given: Mapping[str, Any], key: str, where: str) -> str:
    value = given.get(key)
    if not isinstance(value, str):
        raise wrong(f"{where}.{key}", value, "a string")
    return value


def dumps(value: Any) -> str:
    return msgspec.json.encode(value).decode()
