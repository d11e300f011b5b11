"""The server's routes as an OpenAPI document, `GET /openapi.json`; bodies are the Structs that read them."""

from __future__ import annotations

from typing import Any

import msgspec

from .dialects.chat import ChatRequest
from .dialects.messages_request import CountRequest, MessagesRequest
from .dialects.responses_request import ResponsesRequest
from .session_routes import SamplesRequest, SessionRequest

_ASKS: dict[str, tuple[str, type[msgspec.Struct]]] = {
    "chat/completions": ("One turn in OpenAI's chat dialect.", ChatRequest),
    "responses": ("One turn in OpenAI's responses dialect.", ResponsesRequest),
    "messages": ("One turn in Anthropic's messages dialect.", MessagesRequest),
    "messages/count_tokens": ("The tokens that a request would put before the model.", CountRequest),
}
_ANSWERS = {
    "400": "Refused.",
    "401": "Not your session.",
    "404": "No such session.",
    "409": "The id is taken.",
    "410": "The session has ended.",
    "422": "Not trainable.",
    "502": "The engine failed.",
    "503": "The engine is not there.",
}


def document() -> dict[str, Any]:
    """The whole document."""
    structs = [SessionRequest, SamplesRequest, *(cls for _, cls in _ASKS.values())]
    bodies, components = msgspec.json.schema_components(structs, ref_template="#/components/schemas/{name}")
    schema = dict(zip(structs, bodies, strict=True))
    session = [{"name": "session_id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}]
    picker = {"name": "picker", "in": "query", "schema": {"enum": ["default", "leaves", "all"]}}
    below = "/sessions/{session_id}"
    paths: dict[str, Any] = {
        "/health": {"get": _operation("Whether it serves, and how much it holds.", secured=False)},
        "/metrics": {"get": _operation("Counters in Prometheus' text format.", secured=False)},
        "/sessions": {"post": _operation("Open a session.", body=schema[SessionRequest], status="201")},
        below: {
            "parameters": session,
            "get": _operation("The tree of turns, without ids."),
            "delete": _operation("Abort what runs and remove the session.", status="204"),
        },
        f"{below}/trajectories": {
            "parameters": session,
            "get": {**_operation("Trajectories as msgpack records."), "parameters": [picker]},
        },
        f"{below}/samples": {
            "parameters": session,
            "post": _operation("Training samples.", body=schema[SamplesRequest]),
        },
    }
    for base, parameters in ((f"{below}/v1", session), ("/v1", [])):
        paths[f"{base}/models"] = {"parameters": parameters, "get": _operation("The one model.")}
        for path, (summary, cls) in _ASKS.items():
            paths[f"{base}/{path}"] = {"parameters": parameters, "post": _operation(summary, body=schema[cls])}
    return {
        "openapi": "3.1.0",
        "info": {"title": "miles-tito", "version": "1"},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }


def _operation(
    summary: str, *, body: dict[str, Any] | None = None, status: str = "200", secured: bool = True
) -> dict[str, Any]:
    answers = {code: {"description": text} for code, text in {status: "Done.", **_ANSWERS}.items()}
    operation: dict[str, Any] = {"summary": summary, "responses": answers}
    if body is not None:
        operation["requestBody"] = {"content": {"application/json": {"schema": body}}}
    return {**operation, "security": [{"key": []}]} if secured else operation
