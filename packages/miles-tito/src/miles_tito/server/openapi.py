"""The server's routes as an OpenAPI document, `GET /openapi.json`."""

from __future__ import annotations

from typing import Any

import msgspec

from .session_routes import Grade, Opening

_REF = "#/components/schemas/{name}"
_OBJECT: dict[str, Any] = {"type": "object"}
_FORMAT: dict[str, Any] = {
    "type": "object",
    "properties": {"type": {"enum": ["text", "json_object", "json_schema"]}},
    "required": ["type"],
}
_MESSAGES: dict[str, Any] = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"role": {"enum": ["system", "user", "assistant", "tool"]}, "content": {"type": "string"}},
        "required": ["role", "content"],
    },
}
_COMMON: dict[str, Any] = {"model": {"type": "string"}, "stream": {"type": "boolean"}}
_ASKS: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "chat/completions": (
        "One turn in OpenAI's chat dialect.",
        {
            "messages": _MESSAGES,
            "tools": {"type": "array", "items": _OBJECT},
            "max_tokens": {"type": "integer"},
            "temperature": {"type": "number"},
            "stop": {"type": "array", "items": {"type": "string"}},
            "tool_choice": {"anyOf": [{"enum": ["auto", "none", "required"]}, _OBJECT]},
            "response_format": _FORMAT,
            "logprobs": {"type": "boolean"},
        },
        ["messages"],
    ),
    "responses": (
        "One turn in OpenAI's responses dialect.",
        {
            "input": {"anyOf": [{"type": "string"}, {"type": "array", "items": _OBJECT}]},
            "instructions": {"type": "string"},
            "tools": {"type": "array", "items": _OBJECT},
            "max_output_tokens": {"type": "integer"},
            "tool_choice": {"anyOf": [{"enum": ["auto", "none", "required"]}, _OBJECT]},
            "text": {"type": "object", "properties": {"format": _FORMAT}},
        },
        ["input"],
    ),
    "messages": (
        "One turn in Anthropic's messages dialect.",
        {
            "messages": _MESSAGES,
            "system": {"type": "string"},
            "max_tokens": {"type": "integer"},
            "stop_sequences": {"type": "array", "items": {"type": "string"}},
            "tools": {"type": "array", "items": _OBJECT},
            "tool_choice": _OBJECT,
            "output_config": {"type": "object", "properties": {"format": _FORMAT}},
        },
        ["messages", "max_tokens"],
    ),
    "messages/count_tokens": (
        "The tokens that a request would put before the model.",
        {"messages": _MESSAGES, "system": {"type": "string"}},
        ["messages"],
    ),
}


def document() -> dict[str, Any]:
    """The whole document."""
    (opening, grade), components = msgspec.json.schema_components([Opening, Grade], ref_template=_REF)
    session = [{"name": "session_id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}]
    picker = {"name": "picker", "in": "query", "schema": {"enum": ["default", "leaves", "all"]}}
    below = "/sessions/{session_id}"
    paths: dict[str, Any] = {
        "/health": {"get": _operation("Whether it serves, and how much it holds.", secured=False)},
        "/metrics": {"get": _operation("Counters in Prometheus' text format.", secured=False)},
        "/sessions": {"post": _operation("Open a session.", body=opening, status="201")},
        below: {
            "parameters": session,
            "get": _operation("The tree of turns, without ids."),
            "delete": _operation("Abort what runs and forget the session.", status="204"),
        },
        f"{below}/trajectories": {
            "parameters": session,
            "get": {**_operation("Trajectories as msgpack records."), "parameters": [picker]},
        },
        f"{below}/samples": {"parameters": session, "post": _operation("Training samples.", body=grade)},
    }
    for base, parameters in ((f"{below}/v1", session), ("/v1", [])):
        paths[f"{base}/models"] = {"parameters": parameters, "get": _operation("The one model.")}
        for path, (summary, fields, required) in _ASKS.items():
            shared = {} if path.endswith("count_tokens") else _COMMON
            body = {"type": "object", "properties": {**shared, **fields}, "required": required}
            paths[f"{base}/{path}"] = {"parameters": parameters, "post": _operation(summary, body=body)}
    return {
        "openapi": "3.1.0",
        "info": {"title": "miles-tito", "version": "1"},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }


def _operation(
    summary: str, *, body: dict[str, Any] | None = None, status: str = "200", secured: bool = True
) -> dict[str, Any]:
    refusals = {code: {"description": why} for code, why in (("400", "Refused."), ("401", "Not your session."))}
    more = {"404": {"description": "No such session."}, "409": {"description": "The id is taken."}}
    more |= {"410": {"description": "The session has ended."}, "422": {"description": "Not trainable."}}
    more |= {"502": {"description": "The engine failed."}, "503": {"description": "The engine is not there."}}
    operation: dict[str, Any] = {
        "summary": summary,
        "responses": {status: {"description": "Done."}, **refusals, **more},
    }
    if body is not None:
        operation["requestBody"] = {"content": {"application/json": {"schema": body}}}
    return {**operation, "security": [{"key": []}]} if secured else operation
