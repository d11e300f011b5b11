"""Requests that mean harm, or that a broken client sends: seeded, so that each can be sent again."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

TEXTS = (
    *(
        "",
        "q",
        "\0",
        "\ud800",
        "é漢🙂",
        "<|im_end|>",
        "<tool_call>",
        "</think>",
        "{{ 7 * 7 }}",
        "../../etc",
        "a" * 5000,
    ),
    *("\u202e", "%s%n", "'; DROP TABLE", "\r\nx: y", "null", "-1", "<|im_start|>system\n"),
)
NUMBERS = (0, -1, 1, 2**31, 2**63, 2**64, -(2**63), 1e308, 1e-308, 0.1, 3)
FIELDS = (
    *("model", "messages", "tools", "stream", "stop", "max_tokens", "temperature", "top_p", "n", "seed", "input"),
    *("instructions", "system", "thinking", "tool_choice", "stop_token_ids", "chat_template_kwargs", "metadata"),
    *(
        "reward",
        "advantage",
        "picker",
        "outcome",
        "session_id",
        "sampling",
        "family",
        "ttl_s",
        "deadline_s",
        "prompt_id",
    ),
    *("stream_options", "output_config", "context_management", "reasoning", "text", "include", "max_output_tokens"),
    *("response_format", "logprobs", "parallel_tool_calls"),
)
HEADERS = {
    "x-codex-turn-metadata": ("{", "[]", '{"request_kind": 5}', '{"thread_source": "subagent"}'),
    "x-codex-window-id": (":", "a:99999999999999999999", ":-1"),
    "x-miles-agent": ("", "x" * 3000, "é"),
    "x-miles-kind": ("title", "root", ""),
    "x-stainless-retry-count": ("-1", "x"),
    "content-type": ("text/plain", "application/msgpack", "multipart/form-data"),
    "accept": ("application/msgpack", "application/x-safetensors", "*/*;q=x"),
}
PATHS = ("chat/completions", "responses", "messages", "messages/count_tokens", "models", "nothing")


@dataclass(frozen=True, kw_only=True)
class Attack:
    """One request."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


def attacks(seed: int, *, session: str, keys: list[str]) -> Iterator[Attack]:
    """Endless attacks on `session` with one of `keys`, or none."""
    rng = random.Random(seed)
    while True:
        name = rng.choice([session, session, session, "self", "absent", "%2e%2e", "a" * 300, "s%00"])
        base = f"/sessions/{name}"
        paths = [
            base,
            f"{base}/samples",
            f"{base}/trajectories",
            "/sessions",
            "/v1/messages",
            "/v1/responses",
            "/health",
        ]
        path = rng.choice([*paths, *(f"{base}/v1/{path}" for path in PATHS)])
        if rng.random() < 0.1:
            path += rng.choice(["?picker=all", "?picker=best", "?a=%ff", "?picker=leaves&picker=x", "//", "/"])
        headers = {key: rng.choice(values) for key, values in HEADERS.items() if rng.random() < 0.15}
        key = rng.choice([*keys, *keys, "", "wrong", "Bearer", "é"])
        headers |= {"x-api-key": key} if rng.random() < 0.3 else {"authorization": f"Bearer {key}"}
        right = "GET" if path in (base, f"{base}/trajectories", f"{base}/v1/models", "/health") else "POST"
        yield Attack(
            method=right if rng.random() < 0.9 else rng.choice(["GET", "HEAD", "PUT", "PATCH", "OPTIONS", "POST"]),
            path=path,
            headers={name: value.encode("utf-8", "replace").decode("latin-1") for name, value in headers.items()},
            body=_body(rng),
        )


def _body(rng: random.Random) -> bytes:
    shape = rng.random()
    if shape < 0.05:
        return rng.choice([b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"a":' * 50_000, b"\0" * 10, b"nul", b'"\\ud800"'])
    if shape > 0.7:  # only the messages are strange
        messages = [{"role": "user", "content": rng.choice(TEXTS)}, *([_message(rng)] if shape > 0.85 else [])]
        body: dict[str, Any] = {"messages": messages, "max_tokens": 5} if rng.random() < 0.7 else {"input": messages}
        return json.dumps({**body, "stream": rng.random() < 0.3}).encode()
    body = {rng.choice(FIELDS): _value(rng, 3) for _ in range(rng.randrange(5))}
    if shape < 0.55:
        body |= {"messages": [_message(rng) for _ in range(rng.randrange(1, 4))], "max_tokens": 5}
        body |= {"input": body["messages"]} if rng.random() < 0.3 else {}
        for key in ("messages", "input", "max_tokens")[: rng.randrange(3)] if rng.random() < 0.5 else ():
            body.pop(key, None)
    return json.dumps(body, ensure_ascii=rng.random() < 0.7).encode("utf-8", "surrogatepass")


def _message(rng: random.Random) -> Any:
    if rng.random() < 0.1:
        return _value(rng, 2)
    message: dict[str, Any] = {
        "role": rng.choice(["user", "user", "assistant", "system", "tool", "developer", "root", 3]),
        "content": rng.choice([rng.choice(TEXTS), [_part(rng)], [_part(rng), _part(rng)], _value(rng, 2)]),
    }
    if rng.random() < 0.2:
        message[rng.choice(["tool_calls", "name", "tool_call_id", "reasoning_content", "type"])] = _value(rng, 3)
    return message


def _part(rng: random.Random) -> Any:
    kinds = [
        "text",
        "text",
        "input_text",
        "output_text",
        "image",
        "image_url",
        "tool_use",
        "tool_result",
        "thinking",
        1,
    ]
    part: dict[str, Any] = {"type": rng.choice(kinds), "text": rng.choice(TEXTS)}
    for key in ("source", "image_url", "id", "name", "input", "tool_use_id", "content", "thinking", "signature"):
        if rng.random() < 0.15:
            part[key] = _value(rng, 2)
    return part


def _value(rng: random.Random, depth: int) -> Any:
    kind = rng.randrange(7 if depth else 5)
    match kind:
        case 0:
            return rng.choice(TEXTS)
        case 1:
            return rng.choice(NUMBERS)
        case 2:
            return rng.choice([True, False])
        case 3:
            return None
        case 4:
            return rng.choice(["auto", "none", "default", "user"])
        case 5:
            return [_value(rng, depth - 1) for _ in range(rng.randrange(3))]
        case _:
            keys = ["type", "name", "function", "text", "id", "arguments", "role", "max_tokens", "temperature", "é"]
            return {rng.choice(keys): _value(rng, depth - 1) for _ in range(rng.randrange(3))}
