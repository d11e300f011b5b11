"""A server that somebody else runs, with the face of `EngineServer`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from http import HTTPStatus

import httpx

from miles_rollout.engines.errors import EngineDied, EngineStartError
from miles_rollout.engines.server import POLL_S, PROBE_TIMEOUT_S, Progress
from miles_rollout.engines.versions import check_server_version

INFO_TIMEOUT_S = 30.0
LOST_AFTER = 3
"""Probes without an answer after which the server counts as gone."""


class AttachedServer:
    """An external server. It is checked and watched; it is neither started nor stopped."""

    def __init__(self, url: str, *, api_key: str | None = None, start_timeout_s: float = 300.0) -> None:
        self.url = url.rstrip("/")
        self.start_timeout_s = start_timeout_s
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._stopped = False

    def start(self) -> None:
        """Nothing to start."""
        self._stopped = False

    def wait_ready(self, on_progress: Callable[[Progress], None] | None = None) -> str:
        """Block until the server answers, and check which SGLang it is.

        Raises:
            EngineStartError: when nothing answers for `start_timeout_s`, or `stop` is called meanwhile.
            EngineVersionError: with its version and the supported ones.
        """
        began = time.monotonic()
        while (problem := self._problem()) is not None:
            seconds = time.monotonic() - began
            if self._stopped:
                raise EngineStartError(f"The wait for {self.url} was stopped after {seconds:.0f} s.")
            if seconds > self.start_timeout_s:
                raise EngineStartError(
                    f"No SGLang server answers at {self.url} after {seconds:.0f} s: {problem}. "
                    "Check the address, and that this machine may reach it."
                )
            if on_progress is not None:
                on_progress(Progress(seconds, problem))
            time.sleep(POLL_S)
        info = httpx.get(f"{self.url}/server_info", headers=self._headers, timeout=INFO_TIMEOUT_S)
        if not info.is_success:
            raise EngineStartError(
                f"GET {self.url}/server_info answered {info.status_code}: {info.text[:300]}. "
                "Is it an SGLang server, and is the API key right?",
                status=info.status_code,
            )
        check_server_version(info.json().get("version"), self.url)
        return self.url

    def poll(self) -> int | None:
        """None: an external server has no exit status here. `watch` notices when it goes."""
        return None

    def log_tail(self) -> str:
        """Nothing: its log is its owner's."""
        return ""

    async def watch(self, interval_s: float = 2.0) -> None:
        """Return when `stop` was called; raise when the server stops answering.

        Raises:
            EngineDied: after three probes in a row without an answer.
        """
        failures = 0
        async with httpx.AsyncClient(headers=self._headers, timeout=PROBE_TIMEOUT_S) as client:
            while not self._stopped:
                try:
                    await client.get(f"{self.url}/model_info")
                    failures = 0
                except httpx.HTTPError as error:
                    failures += 1
                    if failures >= LOST_AFTER:
                        raise EngineDied(
                            f"The engine at {self.url} has not answered {failures} probes in a row: {error!r}."
                        ) from error
                await asyncio.sleep(interval_s)

    def stop(self, grace_s: float | None = None) -> None:
        """Let go of the server; it keeps running."""
        del grace_s
        self._stopped = True

    def _problem(self) -> str | None:
        """Why the server is not usable yet; None when it answers."""
        try:
            response = httpx.get(f"{self.url}/model_info", headers=self._headers, timeout=PROBE_TIMEOUT_S)
        except httpx.HTTPError as error:
            return f"{type(error).__name__}: {error}"
        starting = response.status_code == HTTPStatus.SERVICE_UNAVAILABLE
        return f"it answers {response.status_code}" if starting else None
