"""The control side of one server: pause, resume, abort, versions, load. Generation is `miles_tito.engine.sglang`'s."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, cast

import httpx
from miles_tito.errors import EngineError
from miles_tito.records import UNKNOWN_VERSION

PauseMode = Literal["abort", "retract", "in_place"]
"""What becomes of running requests. `abort`: they end, answered with what they have. `retract`: they go back to the
queue and are prefilled again, prompt and output, under the weights of the resume. `in_place`: they keep their cache."""

TIMEOUT_S = 60.0
PAUSE_TIMEOUT_S = 300.0
PROBE_TIMEOUT_S = 5.0
LOAD_TIMEOUT_S = 1800.0
FLUSH_S = 30.0
EXCERPT = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """What one data-parallel rank of a server is doing."""

    dp_rank: int
    num_running: int
    num_waiting: int
    token_usage: float
    """Share of the KV cache in use, 0 to 1."""


class EngineControl:
    """Client for one server's control endpoints.

    Every method raises `EngineError` with the endpoint, the status and the beginning of the answer, except `health`
    and `ready`, whose answer it is.
    """

    def __init__(self, url: str, *, api_key: str | None = None, timeout_s: float = TIMEOUT_S) -> None:
        self.url = url.rstrip("/")
        self._client = httpx.AsyncClient(
            base_url=self.url,
            timeout=timeout_s,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            verify=self.url.startswith("https:"),  # loading the certificate store costs 50 ms a client
        )

    async def __aenter__(self) -> EngineControl:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._client.aclose()

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
        await self._post("/pause_generation", {"mode": mode}, timeout_s=PAUSE_TIMEOUT_S)

    async def resume(self) -> None:
        await self._post("/continue_generation", {})

    async def abort(self, rid: str | None = None) -> None:
        """End one request, or all of them. It is answered with the tokens it has; an unknown `rid` is no error."""
        await self._post("/abort_request", {"rid": "", "abort_all": True} if rid is None else {"rid": rid})

    async def weight_version(self) -> int:
        """The number of the weights it serves; -1 (`UNKNOWN_VERSION`) when they carry none."""
        version = str((await self.model_info()).get("weight_version"))
        return int(version) if version.isdecimal() else UNKNOWN_VERSION

    async def set_weight_version(self, version: int) -> None:
        """Change the number alone. Running requests go on; SGLang's default is to abort them."""
        await self._post("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})

    async def load_weights(self, folder: Path, *, version: int) -> None:
        """Replace the weights by those of a Hugging Face folder that the server sees under the same path.

        After an error it stays paused, for it may hold a part of them.
        """
        await self.pause("abort")
        await self.flush_cache(wait_s=FLUSH_S)
        body = {"model_path": str(folder), "flush_cache": True}
        await self._post("/update_weights_from_disk", body, timeout_s=LOAD_TIMEOUT_S)
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
        await self._send("POST", "/flush_cache", params={"timeout": wait_s}, timeout=TIMEOUT_S + wait_s)

    async def _is_ok(self, path: str, timeout_s: float = PROBE_TIMEOUT_S) -> bool:
        try:
            return (await self._client.get(path, timeout=timeout_s)).is_success
        except httpx.HTTPError:
            return False

    async def _get(self, path: str) -> dict[str, Any]:
        return (await self._send("GET", path)).json()

    async def _post(self, path: str, body: dict[str, Any], *, timeout_s: float | None = None) -> None:
        await self._send("POST", path, json=body, **({} if timeout_s is None else {"timeout": timeout_s}))

    async def _send(self, method: str, path: str, **kwargs: Any) -> httpx.Response:
        try:
            response = await self._client.request(method, path, **kwargs)
        except httpx.HTTPError as error:
            raise EngineError(
                f"{method} {self.url}{path} got no answer: {type(error).__name__} {error}".rstrip(), retryable=True
            ) from error
        if not response.is_success:
            raise EngineError(
                f"{method} {self.url}{path} answered {response.status_code}: {response.text.strip()[:EXCERPT]}",
                status=response.status_code,
                retryable=response.is_server_error,
            )
        return response


class EngineProbe:
    """`Probe` of the supervisor, over HTTP."""

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
