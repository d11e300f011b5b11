"""The router in front of several engines: `smg`, with session affinity.

    session servers ──X-SMG-Routing-Key: <session>──▶ Router ──┬──▶ engine 0
                                                               └──▶ engine 1

Requests with one key go to one engine, where their prefix is cached; a new key goes to the engine with the fewest
requests. An engine that is removed hands its keys to the others. Control endpoints (pause, weights) do not pass
through here: they are for one engine each.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any, cast

from miles_tito.errors import EngineError
from miles_tito.shared.http import Answer, NoAnswer, call_once
from miles_tito.shared.ports import PortReservation

from miles_rollout.engines.errors import EngineStartError
from miles_rollout.engines.process import POLL_S, OwnedProcess, OwnedServer
from miles_rollout.engines.versions import check_smg

ROUTING_KEY = "X-SMG-Routing-Key"
"""Header that names the session of a request."""

CALL_TIMEOUT_S = 10.0
CHANGE_TIMEOUT_S = 60.0
GRACE_S = 3.0

OPTIONS: Sequence[str] = (
    *("--policy", "manual", "--assignment-mode", "min_load"),
    # A request sent again here would be generated twice; the session server does that, under the same request id.
    "--disable-retries",
    # Which engines get traffic is the supervisor's decision, made with add_worker and remove_worker. An engine that
    # is paused for new weights makes no progress and piles up requests, and is neither broken nor overloaded.
    "--disable-circuit-breaker",
    "--disable-worker-overload-protection",
    *("--worker-wedge-secs", "0"),
    # /health runs a request and fails while the engine is paused.
    *("--health-check-endpoint", "/model_info", "--health-check-interval-secs", "5"),
    *("--worker-startup-check-interval", "1"),
    # A run has as many requests in flight as it has episodes; a bound here would answer 429 or wait 60 s and fail.
    *("--max-concurrent-requests", "0"),
    # Requests carry token ids, and nothing is stored.
    *("--disable-tokenizer-autoload", "--history-backend", "none"),
    *("--shutdown-grace-period-secs", "1"),
)


class Router(OwnedServer):
    """An smg process in front of the engines of one table. Engines are added and removed while it runs."""

    name = "router"

    def __init__(
        self, *, log_path: Path, host: str = "127.0.0.1", port: int = 0, request_timeout_s: float = 3600.0
    ) -> None:
        """Prepare a router; `start` starts it, and after its end starts it again at the same address.

        Args:
            log_path: receives what it prints; appended to.
            host: the address to listen on. The default is reachable from this machine only.
            port: where to listen; 0 chooses a free one.
            request_timeout_s: how long one generation may take.
        """
        super().__init__(log_path=log_path, host=host, port=port)
        self.request_timeout_s = request_timeout_s
        self._metrics: PortReservation | None = None

    def start(self, urls: Sequence[str] = (), *, timeout_s: float = 30.0) -> str:
        """Start smg, wait until it listens, and add the engines of `urls`.

        Returns:
            the router's url.

        Raises:
            EngineVersionError: smg is absent or of another version.
            EngineStartError: with the last lines of its log.
        """
        check_smg()
        self._require_ended()
        self._port = self._reserve()
        command = [sys.executable, "-m", "smg", "launch", "--host", self.host, "--port", str(self._port), *OPTIONS]
        command += ["--request-timeout-secs", str(round(self.request_timeout_s))]
        # Its metrics go to a port as well, which is fixed and open to every host unless set.
        self._release_metrics_port()
        self._metrics = PortReservation()
        command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(self._metrics.port)]
        self._process = OwnedProcess(command, log_path=self.log_path)
        self._wait_listening(timeout_s)
        self.add_worker(*urls)
        return self.url

    async def ended(self, interval_s: float = 0.2) -> str:
        """Returns when the process is gone, with its exit status."""
        while (status := self.poll()) is None:  # noqa: ASYNC110  (an exit sets no event)
            await asyncio.sleep(interval_s)
        return f"it exited with status {status}"

    def health(self) -> bool:
        """Whether it answers and has at least one engine to route to."""
        try:
            return call_once("GET", f"{self.url}/readiness", timeout_s=CALL_TIMEOUT_S).is_ok
        except NoAnswer:
            return False

    def workers(self) -> dict[str, bool]:
        """The engines by url, and whether each gets traffic."""
        return {worker["url"]: bool(worker["is_healthy"]) for worker in self._workers()}

    def add_worker(self, *urls: str, timeout_s: float = CHANGE_TIMEOUT_S) -> None:
        """Route to engines from now on; returns when they get traffic. Adding one that is there changes nothing.

        smg probes /health first, which a paused engine does not pass: resume it before.

        Raises:
            EngineError: when smg refuses one, or cannot reach it within `timeout_s`.
        """
        missing = {url.rstrip("/") for url in urls}
        asked: set[str] = set()
        deadline = time.monotonic() + timeout_s
        while missing := {url for url in missing if not self.workers().get(url)}:
            for url in missing - asked:
                # 409 for a while after a removal: smg lets go of an engine in the background.
                answer = self._call("POST", "/workers", json={"url": url}, allowed=(HTTPStatus.CONFLICT,))
                if answer.status != HTTPStatus.CONFLICT:
                    asked.add(url)
            names = ", ".join(sorted(missing))
            self._pause_until(deadline, f"{names} did not become a worker of the router in {timeout_s:.0f} s")

    def remove_worker(self, url: str, *, timeout_s: float = CHANGE_TIMEOUT_S) -> None:
        """Route nothing to an engine from now on; requests in flight go on. Its sessions move to the others."""
        url = url.rstrip("/")
        asked: set[str] = set()
        deadline = time.monotonic() + timeout_s
        while ids := {worker["id"] for worker in self._workers() if worker["url"] == url}:
            # Once each: smg queues removals, and a second one would take away an engine that was added again meanwhile.
            for worker_id in ids - asked:
                self._call("DELETE", f"/workers/{worker_id}", allowed=(HTTPStatus.NOT_FOUND,))
            asked |= ids
            self._pause_until(deadline, f"{url} is still a worker of the router after {timeout_s:.0f} s")

    def set_workers(self, urls: Sequence[str], *, timeout_s: float = CHANGE_TIMEOUT_S) -> None:
        """Route to exactly these engines. Those that leave do so first: they may be dead.

        Raises:
            EngineError: smg does not answer, or one did not become a worker within `timeout_s`.
        """
        wanted = [url.rstrip("/") for url in urls]
        for url in self.workers():
            if url not in wanted:
                self.remove_worker(url, timeout_s=timeout_s)
        self.add_worker(*wanted, timeout_s=timeout_s)

    def stop(self, grace_s: float = GRACE_S) -> None:
        """End the router within about `grace_s` + 5 seconds. Requests in flight fail. Idempotent."""
        self._end(grace_s)
        self._release_metrics_port()

    def _release_metrics_port(self) -> None:
        if self._metrics is not None:
            self._metrics.close()

    def _wait_listening(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not self.process.listens_on(self._port):
            status = self.poll()
            if status is not None or time.monotonic() > deadline:
                what = f"exited with status {status}" if status is not None else f"did not listen in {timeout_s:.0f} s"
                self.stop(grace_s=0)
                raise EngineStartError(
                    f"The router {what}. The last lines of {self.log_path}:\n{self.process.log_tail()}"
                )
            time.sleep(POLL_S)

    def _workers(self) -> list[dict[str, Any]]:
        return cast(list[dict[str, Any]], self._call("GET", "/workers").json()["workers"])

    def _call(self, method: str, path: str, *, allowed: Sequence[int] = (), json: Any = None) -> Answer:
        try:
            answer = call_once(method, f"{self.url}{path}", timeout_s=CALL_TIMEOUT_S, json=json)
        except NoAnswer as error:
            raise EngineError(
                f"{error}. The router "
                + ("runs." if self.poll() is None else f"has exited with status {self.poll()}; see {self.log_path}.")
            ) from error
        if not answer.is_ok and answer.status not in allowed:
            raise EngineError(
                f"{method} {self.url}{path} answered {answer.status}: {answer.excerpt()}", status=answer.status
            )
        return answer

    def _pause_until(self, deadline: float, complaint: str) -> None:
        if time.monotonic() > deadline:
            raise EngineError(f"{complaint}; see {self.log_path}.")
        time.sleep(POLL_S)
