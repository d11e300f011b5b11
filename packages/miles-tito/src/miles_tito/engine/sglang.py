"""The client of an SGLang server (0.5.23 and later): `/generate` with ids in and ids, log-probs, versions out."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from typing import Any, cast

import msgspec
import numpy as np

from miles_tito.errors import EngineError, RecordError
from miles_tito.records import UNKNOWN_VERSION, FinishReason, VersionSpan
from miles_tito.records.arrays import ids_as_json
from miles_tito.shared.http import Answer, Http, NoAnswer

from .expert_routing import ExpertLayout, RoutedDelta, read_engine
from .generation import Engine, GenerateRequest, Generation, one_version

__all__ = ["Engine", "GenerateRequest", "Generation", "SGLangEngine"]

_CONTROL_TIMEOUT_S = 5.0
_PAUSED = -1
_ROUTER_LACKS_ENGINE = ("call_upstream_request_error", "call_upstream_connection_failed", "model_not_found")


class _Load(msgspec.Struct):
    """What one data-parallel rank is doing."""

    num_running_reqs: int
    num_waiting_reqs: int


class _Loads(msgspec.Struct):
    """Body of `GET /v1/loads`, one entry a data-parallel rank."""

    loads: list[_Load]


class SGLangEngine:
    """Client of one SGLang server, or of a router in front of several; implements `Engine`.

    A session server sends every turn through it.
    """

    def __init__(
        self,
        url: str,
        *,
        engines: Sequence[str] = (),
        api_key: str | None = None,
        max_connections: int = 1024,
        timeout_s: float = 900.0,
        experts: ExpertLayout | None = None,
    ) -> None:
        """
        Args:
            engines: the servers behind a router, which does not pass on what is not a generation. Without a router,
                leave it out.
            timeout_s: bounds the silence on one call, a pause for a weight update included.
            experts: of a mixture-of-experts model whose routing is to be recorded; its server then runs with
                `--enable-return-routed-experts`.
        """
        self._experts = experts
        self.url = url.rstrip("/")
        self._engines = tuple(engine.rstrip("/") for engine in engines) or (self.url,)
        self._timeout_s = timeout_s
        self._http = Http(
            silence_s=timeout_s,
            max_connections=max_connections,
            keepalive_s=4.0,  # SGLang closes an idle connection after 5 s
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
        )
        self._aborts: set[asyncio.Task[None]] = set()

    async def generate(self, request: GenerateRequest) -> Generation:
        """One call, whole; see `miles_tito.engine.generation.Engine`."""
        with self._errors(request):
            answer = await self._http.call(
                "POST", f"{self.url}/generate", data=self._body(request, stream=False), headers=_headers(request)
            )
        self._check_status(answer, request)
        return _Progress(request, self._experts).advance(_json(answer.body, request))

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[Generation, None]:
        """One call in pieces; see `miles_tito.engine.generation.Engine`."""
        progress = _Progress(request, self._experts)
        ended = False
        try:
            with self._errors(request):
                async with self._http.open(
                    "POST", f"{self.url}/generate", data=self._body(request, stream=True), headers=_headers(request)
                ) as response:
                    if response.status != 200:
                        body = await response.read()
                        self._check_status(Answer(status=response.status, body=body, headers=response.headers), request)
                    async for data in _events(response.content):
                        piece = progress.advance(_json(data, request))
                        ended = piece.finish_reason is not None
                        yield piece
                        if ended:
                            return
            raise EngineError(
                f"{self.url} ended the stream of {request.rid} after {progress.sent} tokens without a finish reason.",
                retryable=True,
            )
        except GeneratorExit:
            if not ended:  # closed half-way
                self._abort_soon(request.rid)
            raise

    async def abort(self, rid: str) -> None:
        """End the call `rid` wherever it runs."""
        await asyncio.gather(*(self._abort_at(engine, rid) for engine in self._engines))

    async def num_known(self) -> int | None:
        """Calls that run or wait in the engines; None while that says nothing, as during a weight update."""
        counts = await asyncio.gather(*(self._num_known_by(engine) for engine in self._engines))
        answered = [count for count in counts if count is not None]
        return None if not answered or _PAUSED in answered else sum(answered)

    async def aclose(self) -> None:
        """Wait for aborts under way, then close all connections."""
        if self._aborts:
            await asyncio.wait(self._aborts, timeout=_CONTROL_TIMEOUT_S)
        await self._http.aclose()

    async def _abort_at(self, engine: str, rid: str) -> None:
        # The closed connection ends the call as well: best effort.
        with contextlib.suppress(NoAnswer):
            await self._http.call("POST", f"{engine}/abort_request", json={"rid": rid}, timeout_s=_CONTROL_TIMEOUT_S)

    async def _num_known_by(self, engine: str) -> int | None:
        """Calls of one engine; `_PAUSED` while new ones wait outside its queue, None when it does not answer."""
        try:
            ready = await self._http.call("GET", f"{engine}/ready", timeout_s=_CONTROL_TIMEOUT_S)
            if ready.status != 200:
                return _PAUSED
            answer = await self._http.call("GET", f"{engine}/v1/loads?include=core", timeout_s=_CONTROL_TIMEOUT_S)
            loads = msgspec.json.decode(answer.body, type=_Loads).loads
        except (NoAnswer, msgspec.DecodeError):
            return None
        return sum(load.num_running_reqs + load.num_waiting_reqs for load in loads)

    def _body(self, request: GenerateRequest, *, stream: bool) -> bytes:
        sampling = request.sampling
        params: dict[str, Any] = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "max_new_tokens": request.max_new_tokens,
            "stop_token_ids": list(request.stop_token_ids),
            "stop": list(request.stop),
            "skip_special_tokens": False,
            "no_stop_trim": True,
        }
        if sampling.seed is not None:
            params["sampling_seed"] = sampling.seed
        if request.structural_tag:
            params["structural_tag"] = request.structural_tag
        routing: dict[str, Any] = {}
        if self._experts:
            routing = {"return_routed_experts": True, "routed_experts_start_len": request.routed_from}
        return msgspec.json.encode(
            {
                "rid": request.rid,
                "input_ids": msgspec.Raw(ids_as_json(request.input_ids)),
                "sampling_params": params,
                "return_logprob": True,
                "stream": stream,
                **routing,
                **({"image_data": list(request.images)} if request.images else {}),
            }
        )

    def _abort_soon(self, rid: str) -> None:
        task = asyncio.get_running_loop().create_task(self.abort(rid))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    @contextlib.contextmanager
    def _errors(self, request: GenerateRequest) -> Generator[None, None, None]:
        try:
            yield
        except asyncio.CancelledError:
            self._abort_soon(request.rid)
            raise
        except NoAnswer as error:
            if not error.is_silence:
                raise EngineError(f"{self.url} did not answer {request.rid}: {error.reason}", retryable=True) from error
            self._abort_soon(request.rid)
            raise EngineError(
                f"{self.url} was silent for {self._timeout_s:g} s on {request.rid} "
                f"({len(request.input_ids)} tokens in)."
            ) from error

    def _check_status(self, answer: Answer, request: GenerateRequest) -> None:
        status = answer.status
        if status == 200:
            return
        text = answer.excerpt(500)
        retryable = (
            status in (502, 503, 504)
            # The router's own words for an engine that broke off, or for having none at the moment.
            or answer.headers.get("x-smg-error-code", "") in _ROUTER_LACKS_ENGINE
            # Our own earlier sending can still hold the id for a moment after its connection broke.
            or "Duplicate request ID" in text
        )
        raise EngineError(
            f"{self.url} answered {status} to {request.rid} ({len(request.input_ids)} tokens in, up to "
            f"{request.max_new_tokens} out): {text}",
            status=status,
            retryable=retryable,
        )


async def _events(content: Any) -> AsyncGenerator[bytes, None]:
    """The data of server-sent events, one a line; lines may be far longer than a reader's own limit."""
    buffer = bytearray()
    async for chunk in content.iter_any():
        buffer += chunk
        *lines, rest = buffer.split(b"\n")
        buffer = bytearray(rest)
        for line in lines:
            data = line.strip().removeprefix(b"data:").strip()
            if line.startswith(b"data:") and data != b"[DONE]":
                yield bytes(data)


class _Progress:
    """Turns the answers of one call into what is new in each: streams repeat what came before, whole answers do not."""

    def __init__(self, request: GenerateRequest, experts: ExpertLayout | None) -> None:
        self._request = request
        self._experts = experts
        self.sent = 0

    def advance(self, answer: Mapping[str, Any]) -> Generation:
        """The part of `answer` that is new."""
        if "meta_info" not in answer:
            detail = answer.get("error", answer)
            raise EngineError(f"The engine failed on {self._request.rid}: {detail!s:.500}")
        meta = cast("Mapping[str, Any]", answer["meta_info"])
        ids = cast("list[int]", answer.get("output_ids", []))
        rows = cast("list[list[Any]]", meta.get("output_token_logprobs") or [])
        total = int(meta.get("completion_tokens", self.sent + len(ids)))
        new = total - self.sent
        if new < 0 or len(ids) < new or len(rows) < new:
            raise EngineError(
                f"The answer to {self._request.rid} counts {total} tokens after {self.sent}, but brings {len(ids)} ids "
                f"and {len(rows)} log-probs."
            )
        ids, rows = ids[len(ids) - new :], rows[len(rows) - new :]
        if [row[1] for row in rows] != ids:
            raise EngineError(f"Log-probs and ids of {self._request.rid} name different tokens.")
        finish = self._finish(meta.get("finish_reason"))
        piece = Generation(
            output_ids=np.asarray(ids, np.int32),
            logprobs=np.asarray([row[0] for row in rows], np.float32),
            versions=_versions(meta, self.sent, total),
            finish_reason=finish,
            cached_tokens=int(meta.get("cached_tokens") or 0),
            routed=() if finish is None else self._routed(meta, total),
        )
        self.sent = total
        return piece

    def _routed(self, meta: Mapping[str, Any], total: int) -> tuple[RoutedDelta, ...]:
        """The experts of a call that has ended; a payload that is absent or short leaves its tokens without."""
        if self._experts is None:
            return ()
        start = self._request.routed_from
        try:
            delta = read_engine(
                meta.get("routed_experts"),
                self._experts,
                start=start,
                num_rows=len(self._request.input_ids) + total - 1 - start,
                version=_version(meta.get("weight_version")),
            )
        except RecordError as error:
            raise EngineError(f"The answer to {self._request.rid} cannot be read: {error}") from error
        return (delta,) if len(delta.experts) else ()

    def _finish(self, reason: Any) -> FinishReason | None:
        if reason is None:
            return None
        fields = cast("Mapping[str, Any]", reason)
        if fields["type"] == "abort" and fields.get("status_code"):
            raise EngineError(
                f"The engine gave {self._request.rid} up: {fields.get('message')}", status=int(fields["status_code"])
            )
        try:
            return FinishReason(fields["type"])
        except ValueError as error:
            raise EngineError(f"Unknown finish reason {fields} of {self._request.rid}.") from error


def _versions(meta: Mapping[str, Any], start: int, end: int) -> tuple[VersionSpan, ...]:
    """Spans over tokens [start, end) of the call, counted from `start`."""
    spans = cast("list[Mapping[str, Any]] | None", meta.get("weight_versions"))
    if not spans:
        return one_version(end - start, _version(meta.get("weight_version")))
    return tuple(
        VersionSpan(start=first - start, end=last - start, version=_version(span["version"]))
        for span in spans
        if (first := max(int(span["start"]), start)) < (last := min(int(span["end"]), end))
    )


def _version(text: Any) -> int:
    """SGLang's versions are free text ("default" at start); ours are numbers."""
    return int(text) if str(text).isdecimal() else UNKNOWN_VERSION


def _headers(request: GenerateRequest) -> dict[str, str]:
    return {"Content-Type": "application/json", "X-SMG-Routing-Key": request.session_id}


def _json(content: bytes, request: GenerateRequest) -> Mapping[str, Any]:
    try:
        return cast("Mapping[str, Any]", msgspec.json.decode(content))
    except msgspec.DecodeError as error:
        raise EngineError(f"The answer to {request.rid} is no JSON: {content[:200]!r}.", retryable=False) from error
