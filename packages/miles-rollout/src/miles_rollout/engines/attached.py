"""A server that somebody else runs, in place of an `EngineServer`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from http import HTTPStatus

from miles_tito.errors import EngineError
from miles_tito.shared.http import blocking

from miles_rollout.engines.control import PROBE_TIMEOUT_S, EngineControl
from miles_rollout.engines.errors import EngineDied, EngineStartError
from miles_rollout.engines.server import POLL_S, StartProgress
from miles_rollout.engines.versions import check_server_version

LOST_AFTER = 3
"""Probes without an answer after which the server counts as gone."""


class AttachedServer:
    """An external server, for a table with `urls`. It is checked and watched; it is neither started nor stopped."""

    def __init__(self, url: str, *, api_key: str | None = None, start_timeout_s: float = 300.0) -> None:
        self.url = url.rstrip("/")
        self.start_timeout_s = start_timeout_s
        self._api_key = api_key
        self._stopped = False

    def start(self) -> None:
        """Nothing to start."""
        self._stopped = False

    def wait_ready(self, on_progress: Callable[[StartProgress], None] | None = None) -> str:
        """Block until the server answers, and check which SGLang it is.

        Raises:
            EngineStartError: when nothing answers for `start_timeout_s`, or `stop` is called meanwhile.
            EngineVersionError: with its version and the supported ones.
        """
        return blocking(self._wait_ready(on_progress))

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
        async with self._control(PROBE_TIMEOUT_S) as control:
            while not self._stopped:
                problem = await _refused(control)
                failures = failures + 1 if problem is not None and problem.status is None else 0
                if failures >= LOST_AFTER:
                    raise EngineDied(
                        f"The engine at {self.url} has not answered {failures} probes in a row: {problem}."
                    )
                await asyncio.sleep(interval_s)

    def stop(self, grace_s: float | None = None) -> None:
        """Watch the server no longer; it keeps running."""
        del grace_s
        self._stopped = True

    async def _wait_ready(self, on_progress: Callable[[StartProgress], None] | None) -> str:
        began = time.monotonic()
        async with self._control(PROBE_TIMEOUT_S) as control:
            while (problem := await _refused(control)) and problem.status in (None, HTTPStatus.SERVICE_UNAVAILABLE):
                seconds = time.monotonic() - began
                if self._stopped:
                    raise EngineStartError(f"The wait for {self.url} was stopped after {seconds:.0f} s.")
                if seconds > self.start_timeout_s:
                    raise EngineStartError(
                        f"No SGLang server answers at {self.url} after {seconds:.0f} s: {problem}. "
                        "Check the address, and that this machine may reach it."
                    )
                if on_progress is not None:
                    on_progress(StartProgress(seconds, str(problem)))
                await asyncio.sleep(POLL_S)
        async with self._control() as control:
            try:
                info = await control.server_info()
            except EngineError as error:
                raise EngineStartError(
                    f"{error}. Is it an SGLang server, and is the API key right?", status=error.status
                ) from error
        check_server_version(info.get("version"), self.url)
        return self.url

    def _control(self, timeout_s: float = 30.0) -> EngineControl:
        return EngineControl(self.url, api_key=self._api_key, timeout_s=timeout_s)


async def _refused(control: EngineControl) -> EngineError | None:
    """Why the server gives no information about its model; None where it does."""
    try:
        await control.model_info()
    except EngineError as error:
        return error
    return None
