"""A server process that is owned: its log, its end, and nothing left behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, cast

import psutil
from miles_tito.shared.ports import PortReservation

from miles_rollout.engines import guard
from miles_rollout.engines.errors import EngineStartError

POLL_S = 0.05
RESERVE_S = 10.0
TAIL_BYTES = 65536
KILL_S = 5.0


class OwnedProcess:
    """One command under `guard.py`, in its own session, writing to one log file: an engine, a router, an evaluation.

    Terminal signals do not reach the session, so the owner decides when Ctrl-C ends it; and when the owner dies, in
    whatever way, the session dies too.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        log_path: Path,
        env: Mapping[str, str] | None = None,
        shm_prefixes: Sequence[str] = (),
    ) -> None:
        """Start it.

        Args:
            command: what to run; the first entry is an executable.
            log_path: receives stdout and stderr; appended to.
            env: added to this process's environment.
            shm_prefixes: files of /dev/shm whose names start so, and that the command maps, are removed at its end.
        """
        self.command = tuple(command)
        self.log_path = log_path
        log_path.parent.mkdir(parents=True, exist_ok=True)
        self._stopping = threading.Lock()
        self._scratch = tempfile.mkdtemp(prefix="miles-")  # short: sockets in it have a limit of 107 characters
        with log_path.open("ab") as log:
            self._log_start = log.tell()
            self._guard = subprocess.Popen(
                [sys.executable, "-I", "-S", guard.__file__, self._scratch, ",".join(shm_prefixes), *self.command],
                stdin=subprocess.PIPE,
                bufsize=0,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {}), "TMPDIR": self._scratch},
                start_new_session=True,
            )

    @property
    def session_id(self) -> int:
        """Every process of the server has this session id."""
        return self._guard.pid

    def poll(self) -> int | None:
        """Exit status of the command, 128 + n if signal n ended it; None while it runs."""
        status = self._guard.poll()
        if status is not None:
            self._release_guard()
        return status if status is None or status >= 0 else 128 - status

    def wait(self, timeout_s: float) -> int | None:
        """Like `poll`, after at most `timeout_s`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._guard.wait(timeout_s)
        return self.poll()

    def members(self) -> list[int]:
        """Ids of the live processes of the session, the guard included."""
        return guard.session_members(self.session_id)

    def listens_on(self, port: int) -> bool:
        """Whether a process of the session, and not another one, has `port` open."""
        return any(port in _listening_ports(pid) for pid in self.members())

    def log_tail(self, num_lines: int = 20) -> str:
        """The last lines written since this process was started."""
        with self.log_path.open("rb") as log:
            end = log.seek(0, os.SEEK_END)
            log.seek(max(self._log_start, end - TAIL_BYTES))
            lines = log.read().decode(errors="replace").splitlines()
        return "\n".join([line for line in lines if line.strip()][-num_lines:])

    def stop(self, *, grace_s: float = 5.0) -> int:
        """Terminate the command; after `grace_s` kill its whole session. Idempotent, and safe from any thread.

        Returns:
            the exit status, 128 + n if signal n ended it.
        """
        with self._stopping:
            if grace_s > 0 and self.poll() is None:
                with contextlib.suppress(BrokenPipeError, ValueError):  # it may end at any moment
                    self._pipe.write(b"T")
                self.wait(grace_s)
            self._release_guard()
            self.wait(KILL_S)
            if self._guard.returncode is None or self._guard.returncode < 0:
                # The guard hangs or was killed: do its work for it.
                for pid in self.members():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                shutil.rmtree(self._scratch, ignore_errors=True)
            status = self._guard.wait(KILL_S)
            return status if status >= 0 else 128 - status

    @property
    def _pipe(self) -> IO[bytes]:
        assert self._guard.stdin is not None
        return self._guard.stdin

    def _release_guard(self) -> None:
        """Close the pipe: the guard kills whatever still runs."""
        with contextlib.suppress(BrokenPipeError):
            self._pipe.close()


class OwnedServer:
    """An owned process that listens on a port of its own: an engine or the router.

    Started again after its end, it has the same address. Every method may be called from any thread.
    """

    name = "server"
    """In messages."""

    def __init__(self, *, log_path: Path, host: str, port: int) -> None:
        """
        Args:
            log_path: receives what it prints; appended to.
            host: the address to listen on.
            port: where to listen; 0 chooses a free one.
        """
        self.log_path = log_path
        self.host = host
        self._port = port
        """0 until a start has found one that works."""
        self._process: OwnedProcess | None = None
        self._reservation: PortReservation | None = None

    @property
    def url(self) -> str:
        """Where it listens."""
        if self._reservation is None:
            raise EngineStartError(f"The {self.name} has no address yet: call start() first.")
        return f"http://{self.host}:{self._reservation.port}"

    @property
    def process(self) -> OwnedProcess:
        if self._process is None:
            raise EngineStartError(f"The {self.name} has no process yet: call start() first.")
        return self._process

    def poll(self) -> int | None:
        """Exit status, 128 + n if signal n ended it; None while it runs."""
        return self.process.poll()

    def log_tail(self) -> str:
        """The last lines that the process wrote; "" before there is one."""
        return "" if self._process is None else self._process.log_tail()

    def _require_ended(self) -> None:
        if self._process is not None and self._process.poll() is None:
            raise EngineStartError(f"The {self.name} already runs at {self.url}; stop it first.")

    def _reserve(self) -> int:
        """Reserve the port that the next process is to listen on.

        It may still belong for a moment to the dead one before it.

        Raises:
            EngineStartError: it is still taken after a while.
        """
        if self._reservation is not None:
            self._reservation.close()
        deadline = time.monotonic() + RESERVE_S
        while True:
            try:
                self._reservation = PortReservation(self.host, self._port)
                return self._reservation.port
            except OSError as error:
                if time.monotonic() > deadline:
                    raise EngineStartError(
                        f"Port {self._port} of {self.host} cannot be had: {error}. "
                        "End what listens there, or choose another."
                    ) from error
            time.sleep(POLL_S)

    def _end(self, grace_s: float) -> None:
        if self._process is not None:
            self._process.stop(grace_s=grace_s)
        if self._reservation is not None:
            self._reservation.close()


def _listening_ports(pid: int) -> set[int]:
    with contextlib.suppress(psutil.Error):
        connections = cast(list[Any], psutil.Process(pid).net_connections(kind="tcp"))
        return {connection.laddr.port for connection in connections if connection.status == psutil.CONN_LISTEN}
    return set()
