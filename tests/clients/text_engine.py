"""An engine behind SGLang's `/generate` that answers text by rule, as a process of its own would."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from miles_tito import Tokenizer
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

Rule = Callable[[str], str]
"""The model's reply to a whole prompt, both as text."""


def engine_app(tokenizer: Tokenizer, rule: Rule, *, fail_at: int | None = None) -> Starlette:
    """The application; streams answer in three cumulative chunks, as SGLang does.

    Args:
        fail_at: the call, counted from 0, that is answered with status 500.
    """
    calls = itertools.count()

    async def generate(request: Request) -> Response:
        body = await request.json()
        if next(calls) == fail_at:
            return JSONResponse({"error": {"message": "out of memory"}}, status_code=500)
        prompt = await asyncio.to_thread(tokenizer.decode, body["input_ids"], keep=tokenizer.control_ids)
        ids = [*tokenizer.encode(rule(prompt)).tolist(), tokenizer.eos_ids[0]]
        if not body.get("stream"):
            return JSONResponse(_answer(body, ids, len(ids)))

        async def chunks() -> AsyncIterator[str]:
            for end in sorted({max(1, len(ids) // 3), max(1, 2 * len(ids) // 3), len(ids)}):
                yield f"data: {json.dumps(_answer(body, ids, end))}\n\n"
            yield "data: [DONE]\n\n"

        return StreamingResponse(chunks(), media_type="text/event-stream")

    async def abort(_: Request) -> Response:
        return Response()

    return Starlette(
        routes=[Route("/generate", generate, methods=["POST"]), Route("/abort_request", abort, methods=["POST"])]
    )


def _answer(body: dict[str, Any], ids: list[int], end: int) -> dict[str, Any]:
    meta: dict[str, Any] = {
        "id": body["rid"],
        "prompt_tokens": len(body["input_ids"]),
        "completion_tokens": end,
        "cached_tokens": 0,
        "weight_version": "3",
        "finish_reason": {"type": "stop", "matched": ids[-1]} if end == len(ids) else None,
        "output_token_logprobs": [[-0.5, token, None] for token in ids[:end]],
    }
    return {"text": "", "output_ids": ids[:end], "meta_info": meta}
