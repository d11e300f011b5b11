"""One SGLang server that this process starts, watches and stops.

EngineServer(...)  ──start()──▶ starting ──wait_ready()──▶ ready ──stop()──▶ stopped
                                    │                        │
                                    └── EngineStartError     └── poll() is a number, watch() raises EngineDied

`with EngineServer(...) as server:` is ready inside, and stopped afterwards.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from miles_tito.shared.http import blocking
from miles_tito.shared.ports import port_of

from miles_rollout.engines.command import server_command, server_environment
from miles_rollout.engines.config import EngineConfig, resolve_device
from miles_rollout.engines.control import EngineControl
from miles_rollout.engines.errors import EngineDied, EngineStartError
from miles_rollout.engines.process import OwnedProcess, OwnedServer
from miles_rollout.engines.versions import Device, check_sglang

POLL_S = 0.1
PROGRESS_S = 1.0
BIND_ATTEMPTS = 3
BIND_FAILURES = ("address already in use", "errno 98", "error while attempting to bind")
GPU_GRACE_S = 20.0
LEFT_BEHIND = ("sgl",)
"""Shared memory that SGLang leaves in /dev/shm: load statistics, message queues between ranks."""

ADVICE: Mapping[str, str] = {
    "out of memory": "Less memory: lower `max_total_tokens`, or `options.mem-fraction-static` on a GPU.",
    "exit code: -9": "The kernel probably killed it for memory: lower `max_total_tokens`, or free some.",
    "does not appear to have a file named config.json": "The model folder is incomplete.",
    "unrecognized arguments": "An entry of `options` is not an option of this SGLang version.",
    "longer than the derived": "Lower `context_length` of the engine to what the model allows.",
}
"""What a line of the log means, and what to do."""


@dataclass(frozen=True, slots=True)
class StartProgress:
    """How far a start is, as `wait_ready` reports it."""

    seconds: float
    last_line: str
    """What the server logged last."""


Progress = StartProgress
"""An older name."""


class EngineServer(OwnedServer):
    """A server process with its log, on a port of its own, for whoever runs engines: in miles-core an actor."""

    name = "engine"

    def __init__(
        self,
        config: EngineConfig,
        *,
        model_path: str | Path,
        log_path: Path,
        host: str = "127.0.0.1",
        port: int = 0,
        weight_version: int = 0,
    ) -> None:
        """Describe a server; `start` starts it, and after its end starts it again at the same address.

        Args:
            config: what to start; `urls` must be empty (see `AttachedServer`).
            model_path: a local folder or a hub name.
            log_path: receives what the server prints; appended to.
            host: the address to listen on. The default is reachable from this machine only.
            port: where to listen; 0 chooses a free one.
            weight_version: the number of the weights in `model_path`.
        """
        assert not config.urls, "servers of `urls` are attached to, not started"
        super().__init__(log_path=log_path, host=host, port=port)
        self.config = config
        self.device: Device = resolve_device(config.device, config.env)
        self.model_path = model_path
        self.weight_version = weight_version
        self._stop_asked = threading.Event()
        self._launching = threading.Lock()  # no process is started after stop() has looked for one to end

    def __enter__(self) -> Self:
        """Start and wait until it is ready; raises as `start` and `wait_ready` do."""
        try:
            self.start()
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def start(self) -> None:
        """Check versions and start the process; returns at once. The address is final once `wait_ready` has returned.

        Raises:
            EngineVersionError: with the command that installs a supported version.
        """
        check_sglang(self.device)
        self._require_ended()
        self._stop_asked.clear()
        self._launch()

    def wait_ready(self, on_progress: Callable[[StartProgress], None] | None = None) -> str:
        """Block until the server answers, and return its url.

        `on_progress` is called about every second.

        Raises:
            EngineStartError: when the process ends, `start_timeout_s` passes, or `stop` is called meanwhile. The
                message ends with the last 20 lines of its log. The process is gone by then.
        """
        began = time.monotonic()
        attempts = 1
        reported = began
        while not self._answers():
            now = time.monotonic()
            if self._stop_asked.is_set():
                raise _stopped_early()
            if (status := self.process.poll()) is not None:
                if attempts >= BIND_ATTEMPTS or not _failed_to_bind(self.process.log_tail(50)):
                    raise self._start_error(f"exited with status {status} after {now - began:.0f} s")
                attempts += 1
                self._launch()
            elif now - began > self.config.start_timeout_s:
                self.process.stop(grace_s=0)
                raise self._start_error(f"did not come up in {self.config.start_timeout_s:.0f} s (`start_timeout_s`)")
            if on_progress is not None and now - reported >= PROGRESS_S:
                reported = now
                on_progress(StartProgress(now - began, self.process.log_tail(1)))
            self._stop_asked.wait(POLL_S)
        self._port = port_of(self.url)
        return self.url

    async def watch(self, interval_s: float = 0.5) -> None:
        """Return when the server is stopped; raise when it exits by itself. Made for a task group.

        Raises:
            EngineDied: with the exit status and the last 20 lines of the log.
        """
        while (status := self.poll()) is None:  # noqa: ASYNC110  (a process exit sets no asyncio event)
            await asyncio.sleep(interval_s)
        if not self._stop_asked.is_set():
            raise EngineDied(
                f"The engine at {self.url} exited with status {status}.\n"
                f"The last lines of {self.log_path}:\n{self.process.log_tail()}"
            )

    def stop(self, grace_s: float | None = None) -> None:
        """End the server and every process of its session, within about `grace_s` + 5 seconds. Idempotent.

        Args:
            grace_s: how long it may take to end by itself. None: 20 s on a GPU, whose memory a killed process can
                leave taken; none on a CPU, where SGLang spends 6 s on a shutdown that frees nothing more.
        """
        self._stop_asked.set()
        if grace_s is None:
            grace_s = GPU_GRACE_S if self.device == "cuda" else 0.0
        with self._launching:
            self._end(grace_s)

    def _launch(self) -> None:
        with self._launching:
            if self._stop_asked.is_set():
                raise _stopped_early()
            command = server_command(
                self.config,
                model_path=self.model_path,
                host=self.host,
                port=self._reserve(),
                weight_version=self.weight_version,
            )
            env = server_environment(self.config, model_path=self.model_path)
            self._process = OwnedProcess(command, log_path=self.log_path, env=env, shm_prefixes=LEFT_BEHIND)

    def _answers(self) -> bool:
        """Whether this server, and not another process on its port, is ready for requests."""

        async def is_ready() -> bool:
            async with EngineControl(self.url) as control:
                return await control.ready()

        return blocking(is_ready()) and self.process.listens_on(port_of(self.url))

    def _start_error(self, what: str) -> EngineStartError:
        tail = self.process.log_tail()
        advice = [text for sign, text in ADVICE.items() if sign in self.process.log_tail(200).lower()]
        return EngineStartError(
            "\n".join(
                [
                    f"The engine for {self.model_path} on {self.device} {what}.",
                    *advice,
                    f"The last lines of {self.log_path}:",
                    tail or "(nothing was written)",
                ]
            )
        )


def _stopped_early() -> EngineStartError:
    return EngineStartError("The engine was stopped before it was ready.")


def _failed_to_bind(log: str) -> bool:
    return any(sign in log.lower() for sign in BIND_FAILURES)
