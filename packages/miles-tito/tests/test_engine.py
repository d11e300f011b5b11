"""The SGLang client against a server that answers as SGLang 0.5.23 does."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest
from miles_tito import UNKNOWN_VERSION, EngineError, FinishReason, Sampling, SGLangEngine, VersionSpan
from miles_tito.engine.expert_routing import ExpertLayout
from miles_tito.engine.generation import GenerateRequest, join, run_turn
from miles_tito.records.arrays import ids_as_json
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

Served = Callable[[Any], Any]


def request(**changes: Any) -> GenerateRequest:
    fields: dict[str, Any] = {
        "rid": "r1",
        "session_id": "ep-1",
        "input_ids": np.array([1, 2, 3], np.int32),
        "sampling": Sampling(temperature=0.7, top_p=0.9, top_k=20, seed=5),
        "max_new_tokens": 8,
        "stop_token_ids": (2,),
        "stop": ("END",),
    }
    return GenerateRequest(**{**fields, **changes})


def answer(ids: list[int], *, finish: Any = None, **meta: Any) -> dict[str, Any]:
    finish = {"type": "stop", "matched": 2} if finish is None else finish
    return {
        "text": "ignored",
        "output_ids": ids,
        "meta_info": {
            "id": "r1",
            "finish_reason": finish or None,
            "prompt_tokens": 3,
            "completion_tokens": len(ids),
            "cached_tokens": 1,
            "weight_version": "4",
            "output_token_logprobs": [[-0.5 - n, token, None] for n, token in enumerate(ids)],
            **meta,
        },
    }


class FakeSGLang:
    """Answers `/generate` from a queue; a callable there takes the request over."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.aborted: list[str] = []
        self.abort_seen = asyncio.Event()
        self.is_paused = False
        self.loads: list[tuple[int, int]] = []
        """Running and waiting requests of each data-parallel rank."""
        self.app = Starlette(
            routes=[
                Route("/generate", self.generate, methods=["POST"]),
                Route("/abort_request", self.abort, methods=["POST"]),
                Route("/ready", self.ready),
                Route("/v1/loads", self.say_loads),
            ]
        )

    async def generate(self, asked: Request) -> Response:
        self.bodies.append(await asked.json())
        self.headers.append(dict(asked.headers))
        reply = self.answers.pop(0)
        if callable(reply):
            return await reply()
        if self.bodies[-1]["stream"]:
            return StreamingResponse(_events(reply), media_type="text/event-stream")
        return JSONResponse(reply)

    async def abort(self, asked: Request) -> Response:
        self.aborted.append((await asked.json())["rid"])
        self.abort_seen.set()
        return Response()

    async def ready(self, asked: Request) -> Response:
        return Response(status_code=503 if self.is_paused else 200)

    async def say_loads(self, asked: Request) -> Response:
        loads = [{"dp_rank": n, "num_running_reqs": r, "num_waiting_reqs": w} for n, (r, w) in enumerate(self.loads)]
        return JSONResponse({"loads": loads})


async def _events(chunks: list[dict[str, Any]]) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield b"data: " + json.dumps(chunk).encode() + b"\n\n"
    yield b"data: [DONE]\n\n"


async def test_ids_go_in_and_ids_log_probs_and_versions_come_out(served: Served):
    spans = [{"version": "4", "start": 0, "end": 1}, {"version": "default", "start": 1, "end": 3}]
    fake = FakeSGLang(answer([7, 8, 2], weight_versions=spans))
    async with served(fake.app) as url:
        engine = SGLangEngine(url, api_key="secret")
        made = await engine.generate(request())
        await engine.aclose()
    assert made.output_ids.tolist() == [7, 8, 2]
    assert made.logprobs.tolist() == [-0.5, -1.5, -2.5]
    assert made.versions == (
        VersionSpan(start=0, end=1, version=4),
        VersionSpan(start=1, end=3, version=UNKNOWN_VERSION),
    )
    assert (made.finish_reason, made.cached_tokens) == (FinishReason.STOP, 1)
    [body] = fake.bodies
    assert body == {
        "rid": "r1",
        "input_ids": [1, 2, 3],
        "return_logprob": True,
        "stream": False,
        "sampling_params": {
            "temperature": 0.7,
            "top_p": 0.9,
            "top_k": 20,
            "min_p": 0.0,
            "max_new_tokens": 8,
            "stop_token_ids": [2],
            "stop": ["END"],
            "skip_special_tokens": False,
            "no_stop_trim": True,
            "sampling_seed": 5,
        },
    }
    assert fake.headers[0]["x-smg-routing-key"] == "ep-1"
    assert fake.headers[0]["authorization"] == "Bearer secret"


@pytest.mark.parametrize("cumulative", [True, False])
async def test_streamed_chunks_are_disjoint_whether_the_server_repeats_them_or_not(cumulative: bool, served: Served):
    ids = [7, 8, 9, 2]
    spans = [{"version": "4", "start": 0, "end": 3}, {"version": "5", "start": 3, "end": 4}]
    chunks: list[dict[str, Any]] = []
    for n, end in enumerate((1, 3, 4)):
        chunk = answer(ids[:end], finish=False if end < 4 else None, weight_versions=spans)
        if not cumulative:
            start = (0, 1, 3)[n]
            chunk["output_ids"] = ids[start:end]
            chunk["meta_info"]["output_token_logprobs"] = chunk["meta_info"]["output_token_logprobs"][start:]
        chunks.append(chunk)
    fake = FakeSGLang(chunks)
    async with served(fake.app) as url:
        engine = SGLangEngine(url)
        pieces = [piece async for piece in engine.stream(request())]
        await engine.aclose()
    assert [piece.output_ids.tolist() for piece in pieces] == [[7], [8, 9], [2]]
    made = join(pieces)
    assert made.logprobs.tolist() == [-0.5, -1.5, -2.5, -3.5]
    assert made.versions == (VersionSpan(start=0, end=3, version=4), VersionSpan(start=3, end=4, version=5))
    assert made.finish_reason is FinishReason.STOP


async def test_an_abort_in_the_waiting_queue_with_its_short_answer_is_understood(served: Served):
    short = {
        "output_ids": [],
        "meta_info": {
            "id": "r1",
            "finish_reason": {"type": "abort", "message": "Abort in waiting queue"},
            "weight_version": "4",
            "completion_tokens": 0,
        },
    }
    fake = FakeSGLang(short, answer([7, 2]))
    async with served(fake.app) as url:
        engine = SGLangEngine(url)
        made = join([piece async for piece in run_turn(engine, request(), stream=False)])
        await engine.aclose()
    assert made.output_ids.tolist() == [7, 2]
    assert [body["rid"] for body in fake.bodies] == ["r1", "r1"]


async def _error(status: int, body: dict[str, Any], **headers: str) -> Response:
    return JSONResponse(body, status, headers=headers)


@pytest.mark.parametrize(
    ("status", "text", "retryable"),
    [
        (400, "The input (9 tokens) is longer than the model's context length (8 tokens).", False),
        (400, "Duplicate request ID detected: r1", True),
        (500, "internal", False),
        (503, "no worker", True),
    ],
)
async def test_a_refusal_says_what_the_server_said(status: int, text: str, retryable: bool, served: Served):
    fake = FakeSGLang(lambda: _error(status, {"error": {"message": text}}))
    async with served(fake.app) as url:
        engine = SGLangEngine(url)
        with pytest.raises(EngineError) as caught:
            await engine.generate(request())
        await engine.aclose()
    assert caught.value.status == status
    assert caught.value.retryable is retryable
    assert text[:20] in str(caught.value)
    assert "3 tokens in, up to 8 out" in str(caught.value)


@pytest.mark.parametrize(
    ("status", "code", "retryable"),
    [
        (500, "call_upstream_request_error", True),
        (500, "call_upstream_connection_failed", True),
        (404, "model_not_found", True),
        (400, "invalid_request", False),
    ],
)
async def test_a_router_that_lost_its_engine_is_asked_again(status: int, code: str, retryable: bool, served: Served):
    fake = FakeSGLang(lambda: _error(status, {}, **{"x-smg-error-code": code}))
    async with served(fake.app) as url:
        engine = SGLangEngine(url)
        with pytest.raises(EngineError) as caught:
            await engine.generate(request())
        await engine.aclose()
    assert caught.value.retryable is retryable


async def test_behind_a_router_an_abort_goes_to_every_engine_and_not_to_the_router(served: Served):
    router, first, second = FakeSGLang(), FakeSGLang(), FakeSGLang()
    async with served(router.app) as url, served(first.app) as first_url, served(second.app) as second_url:
        engine = SGLangEngine(url, engines=[first_url, second_url, "http://127.0.0.1:9"])
        await engine.abort("r7")
        await engine.aclose()
    assert (router.aborted, first.aborted, second.aborted) == ([], ["r7"], ["r7"])


async def test_what_the_engines_know_of_is_counted_unless_one_is_paused(served: Served):
    first, second = FakeSGLang(), FakeSGLang()
    first.loads = [(2, 5), (1, 0)]
    second.loads = [(4, 0)]
    async with served(first.app) as first_url, served(second.app) as second_url:
        engine = SGLangEngine("http://127.0.0.1:9", engines=[first_url, second_url, "http://127.0.0.1:9"])
        assert await engine.num_known() == 12
        second.is_paused = True
        assert await engine.num_known() is None
        await engine.aclose()
    engine = SGLangEngine("http://127.0.0.1:9")
    assert await engine.num_known() is None
    await engine.aclose()


async def test_no_server_is_a_retryable_error_that_names_the_url():
    engine = SGLangEngine("http://127.0.0.1:9")
    with pytest.raises(EngineError, match=r"127\.0\.0\.1:9 did not answer r1") as caught:
        await engine.generate(request())
    assert caught.value.retryable
    await engine.aclose()


async def test_a_broken_connection_is_aborted_and_sent_again_under_the_same_id(served: Served):
    async def cut() -> Response:
        async def half() -> AsyncIterator[bytes]:
            yield b'data: {"output_ids": [7'
            raise ConnectionResetError

        return StreamingResponse(half(), headers={"content-length": "1000"})

    fake = FakeSGLang(cut, [answer([7, 2])])
    async with served(fake.app) as url:
        engine = SGLangEngine(url)
        made = join([piece async for piece in run_turn(engine, request(), stream=True)])
        await engine.aclose()
    assert made.output_ids.tolist() == [7, 2]
    assert [body["rid"] for body in fake.bodies] == ["r1", "r1"]
    assert fake.aborted == ["r1"]


async def test_cancelling_a_call_aborts_it_at_the_server(served: Served):
    started, never = asyncio.Event(), asyncio.Event()

    async def hang() -> Response:
        started.set()
        await never.wait()
        return Response()

    fake = FakeSGLang(hang)
    async with served(fake.app) as url:
        engine = SGLangEngine(url)
        task = asyncio.create_task(engine.generate(request()))
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await fake.abort_seen.wait()
        await engine.aclose()
        never.set()
    assert fake.aborted == ["r1"]


async def test_a_silent_server_ends_in_an_error_with_the_limit(served: Served):
    never = asyncio.Event()

    async def hang() -> Response:
        await never.wait()
        return Response()

    fake = FakeSGLang(hang)
    async with served(fake.app) as url:
        engine = SGLangEngine(url, timeout_s=0.05)
        with pytest.raises(EngineError, match=r"silent for 0.05 s on r1 \(3 tokens in\)"):
            await engine.generate(request())
        await engine.aclose()
        never.set()


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        (answer([7, 2], output_token_logprobs=[[-1.0, 7, None]]), "brings 2 ids and 1 log-probs"),
        (answer([7], output_token_logprobs=[[-1.0, 8, None]]), "name different tokens"),
        (answer([7], output_token_logprobs=[[None, 7, None]]), "not finite"),
        (answer([7], finish={"type": "novel"}), "Unknown finish reason"),
        (answer([], finish={"type": "abort", "message": "OOM", "status_code": 500}), "gave r1 up: OOM"),
        ({"error": {"message": "bad"}}, "failed on r1"),
    ],
)
async def test_an_answer_that_cannot_be_trained_on_is_refused(reply: Any, why: str, served: Served):
    fake = FakeSGLang(reply)
    async with served(fake.app) as url:
        engine = SGLangEngine(url)
        with pytest.raises(EngineError, match=why):
            await engine.generate(request())
        await engine.aclose()


def experts_of(rows: int) -> str:
    ids = np.arange(rows * 3 * 2, dtype="<i4") % 4
    return base64.b64encode(ids.tobytes()).decode()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("rows", "held"), [(3, (1, 4)), (2, (1, 3)), (0, None)])
async def test_experts_are_asked_for_from_the_first_token_without(
    stream: bool, rows: int, held: tuple[int, int] | None, served: Any
):
    """Three tokens in, two out, the first row known: rows of tokens 1 to 3 are due, and a short payload lacks some."""
    layout = ExpertLayout(num_layers=3, layers=(1, 2), num_experts=4, experts_per_token=2)
    last = answer([7, 8], **({"routed_experts": experts_of(rows)} if rows else {}))
    server = FakeSGLang([answer([7], finish=False), last] if stream else last)
    async with served(server.app) as url:
        engine = SGLangEngine(url, experts=layout)
        pieces = [piece async for piece in run_turn(engine, request(routed_from=1), stream=stream)]
        await engine.aclose()
    assert server.bodies[0]["return_routed_experts"] is True
    assert server.bodies[0]["routed_experts_start_len"] == 1
    told = join(pieces).routed
    assert [(delta.start, delta.end, delta.version, delta.layers) for delta in told] == (
        [(*held, 4, (1, 2))] if held else []
    )


async def test_a_forced_form_goes_to_the_engine_as_its_grammar(served: Any):
    fake = FakeSGLang(answer([7, 2]), answer([7, 2]))
    async with served(fake.app) as url:
        engine = SGLangEngine(url)
        await engine.generate(request(structural_tag='{"type":"structural_tag"}'))
        await engine.generate(request())
        await engine.aclose()
    assert [body["sampling_params"].get("structural_tag") for body in fake.bodies] == [
        '{"type":"structural_tag"}',
        None,
    ]


async def test_without_a_layout_no_experts_are_asked_for(served: Any):
    server = FakeSGLang(answer([7, 2]))
    async with served(server.app) as url:
        engine = SGLangEngine(url)
        await engine.generate(request())
        await engine.aclose()
    assert "return_routed_experts" not in server.bodies[0]


async def test_experts_of_another_model_are_an_engine_error(served: Any):
    layout = ExpertLayout(num_layers=3, layers=(1,), num_experts=2, experts_per_token=2)
    server = FakeSGLang(answer([7, 2], routed_experts=experts_of(4)))
    async with served(server.app) as url:
        engine = SGLangEngine(url, experts=layout)
        with pytest.raises(EngineError, match="is the layout of another model"):
            await engine.generate(request())
        await engine.aclose()


@pytest.mark.parametrize("ids", [[], [0], [7, 0, 151645, 9, 99999], [262143, 1]])
def test_ids_are_written_as_a_json_array(ids: list[int]):
    assert json.loads(ids_as_json(np.asarray(ids, np.int32))) == ids
