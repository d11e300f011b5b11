"""The client of one SGLang server: pause, resume, abort, weights, load. Generation is `miles_tito.engine.sglang`'s."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, cast

from miles_tito.errors import EngineError
from miles_tito.records import UNKNOWN_VERSION
from miles_tito.shared.http import Answer, Http, NoAnswer

PauseMode = Literal["abort", "retract", "in_place"]
"""What becomes of running requests. `abort`: they end, answered with what they have. `retract`: they go back to the
queue and are prefilled again, prompt and output, under the weights of the resume. `in_place`: they keep their cache."""

TIMEOUT_S = 60.0
PAUSE_TIMEOUT_S = 300.0
PROBE_TIMEOUT_S = 5.0
LOAD_TIMEOUT_S = 1800.0
FLUSH_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """What one data-parallel rank of a server is doing."""

    dp_rank: int
    num_running: int
    num_waiting: int
    token_usage: float
    """Share of the KV cache in use, 0 to 1."""


class EngineControl:
    """The control endpoints of one server, for whoever starts it, watches it or changes its weights.

    Every method raises `EngineError` with the endpoint, the status and the beginning of the answer, except `health`,
    `ready` and `probe`, whose answer it is.
    """

    def __init__(self, url: str, *, api_key: str | None = None, timeout_s: float = TIMEOUT_S) -> None:
        self.url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._http = Http(
            silence_s=LOAD_TIMEOUT_S,
            keepalive_s=4.0,  # SGLang closes an idle connection after 5 s
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._http.aclose()

    async def health(self) -> bool:
        """Whether the server process answers. Costs it nothing, also while it is paused.

        SGLang's own /health takes a second, runs a request, and fails while paused: see `probe`.
        """
        return await self._is_ok("/model_info")

    async def ready(self) -> bool:
        """Whether it takes new requests: up, and not paused."""
        return await self._is_ok("/ready")

    async def probe(self, timeout_s: float = 30.0) -> bool:
        """Whether a one-token request gets through the scheduler. Takes a second or more; False while paused."""
        return await self._is_ok("/health_generate", timeout_s)

    async def pause(self, mode: PauseMode = "retract") -> None:
        """Stop generating. New requests wait from now on, without an error, until `resume`."""
        await self._call("POST", "/pause_generation", {"mode": mode}, timeout_s=PAUSE_TIMEOUT_S)

    async def resume(self) -> None:
        await self._call("POST", "/continue_generation", {})

    async def abort(self, rid: str | None = None) -> None:
        """End one request, or all of them. It is answered with the tokens it has; an unknown `rid` is no error."""
        await self._call("POST", "/abort_request", {"rid": "", "abort_all": True} if rid is None else {"rid": rid})

    async def weight_version(self) -> int:
        """The number of the weights it serves; -1 (`UNKNOWN_VERSION`) when they carry none."""
        version = str((await self.model_info()).get("weight_version"))
        return int(version) if version.isdecimal() else UNKNOWN_VERSION

    async def set_weight_version(self, version: int) -> None:
        """Change the number alone. Running requests go on; SGLang's default is to abort them."""
        body = {"new_version": str(version), "abort_all_requests": False}
        await self._call("POST", "/update_weight_version", body)

    async def load_weights(self, folder: Path, *, version: int) -> None:
        """Replace the weights by those of a Hugging Face folder that the server sees under the same path.

        After an error it stays paused, for it may hold a part of them.
        """
        await self.pause("abort")
        await self.flush_cache(wait_s=FLUSH_S)
        body = {"model_path": str(folder), "flush_cache": True}
        await self._call("POST", "/update_weights_from_disk", body, timeout_s=LOAD_TIMEOUT_S)
        await self.set_weight_version(version)
        await self.resume()

    async def model_info(self) -> dict[str, Any]:
        return await self._get("/model_info")

    async def server_info(self) -> dict[str, Any]:
        """Every resolved server option, and the SGLang `version`."""
        return await self._get("/server_info")

    async def loads(self) -> tuple[EngineLoad, ...]:
        answer = await self._get("/v1/loads")
        return tuple(
            EngineLoad(
                dp_rank=load["dp_rank"],
                num_running=load["num_running_reqs"],
                num_waiting=load["num_waiting_reqs"],
                token_usage=load["token_usage"],
            )
            for load in cast(list[dict[str, Any]], answer["loads"])
        )

    async def flush_cache(self, wait_s: float = 0.0) -> None:
        """Empty the prefix cache. Refused while requests run, for up to `wait_s`."""
        await self._call("POST", f"/flush_cache?timeout={wait_s}", timeout_s=TIMEOUT_S + wait_s)

    async def _is_ok(self, path: str, timeout_s: float = PROBE_TIMEOUT_S) -> bool:
        try:
            return (await self._http.call("GET", self.url + path, timeout_s=timeout_s)).is_ok
        except NoAnswer:
            return False

    async def _get(self, path: str) -> dict[str, Any]:
        answer = await self._call("GET", path)
        try:
            return answer.json()
        except ValueError as error:
            raise EngineError(
                f"GET {self.url}{path} answered no JSON: {answer.excerpt()}", status=answer.status
            ) from error

    async def _call(self, method: str, path: str, body: Any = None, *, timeout_s: float | None = None) -> Answer:
        try:
            answer = await self._http.call(method, self.url + path, json=body, timeout_s=timeout_s or self._timeout_s)
        except NoAnswer as error:
            raise EngineError(str(error), retryable=True) from error
        if not answer.is_ok:
            raise EngineError(
                f"{method} {self.url}{path.partition('?')[0]} answered {answer.status}: {answer.excerpt()}",
                status=answer.status,
                retryable=answer.status >= 500,
            )
        return answer


class EngineProbe:
    """What the supervisor asks of a running engine, over HTTP."""

    def __init__(self, *, api_key: str | None = None) -> None:
        self._api_key = api_key

    async def version(self, url: str) -> int | None:
        """The weights that the engine says it serves; None when it does not answer."""
        async with EngineControl(url, api_key=self._api_key, timeout_s=PROBE_TIMEOUT_S) as control:
            try:
                return await control.weight_version()
            except EngineError:
                return None

    async def makes_progress(self, url: str) -> bool:
        """Whether a token gets through; says so after 20 s at the latest, which is SGLang's own limit."""
        async with EngineControl(url, api_key=self._api_key) as control:
            return await control.probe()

    async def abort_all(self, url: str) -> None:
        """End everything that the engine runs."""
        async with EngineControl(url, api_key=self._api_key) as control:
            await control.abort()
