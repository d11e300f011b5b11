"""A fixed number of processes that run reward functions; one that hangs or crashes is killed and replaced.

call ─▶ idle process ─▶ function, arguments ─▶ "ready" ─▶ outcome ─▶ process idle again
                            │                      │
                      start timeout             timeout, crash, cancellation: killed, a new one takes its place
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from miles_envs.errors import GraderCrash, GraderTimeout, VerifierError

from .grader import HEADER

logger = logging.getLogger(__name__)

_PROGRAM = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[3]); "
    "from miles_envs.rewards.grader import main; main(int(sys.argv[1]), int(sys.argv[2]))"
)


class RewardPool:
    """Calls plain functions in processes of its own. Belongs to the event loop that first uses it, until `aclose`."""

    def __init__(self, *, num_workers: int = 2, timeout_s: float = 30.0, start_timeout_s: float = 120.0) -> None:
        """
        Args:
            num_workers: processes, started at the first call.
            timeout_s: longest time that a function may run, unless the call says otherwise.
            start_timeout_s: longest time for a process to start and to import the function.
        """
        if num_workers < 1:
            raise ValueError(f"`num_workers` is {num_workers}; a pool has at least one process.")
        self.num_workers = num_workers
        self._timeout_s = timeout_s
        self._start_timeout_s = start_timeout_s
        self._idle: asyncio.Queue[_Process | None] | None = None
        self._processes: set[_Process] = set()
        self.num_replaced = 0
        """Processes killed or found dead so far."""

    @property
    def pids(self) -> frozenset[int]:
        """Of the processes that are alive."""
        return frozenset(process.pid for process in self._processes if process.is_alive)

    async def call(
        self, function: Callable[..., Any], *arguments: Any, what: str, timeout_s: float | None = None
    ) -> Any:
        """`function(*arguments)`, run in a process; waits for an idle one first.

        Args:
            what: names the sample in warnings and errors.
            timeout_s: of this call, from when the function starts.

        Raises:
            VerifierError: the function raised.
            GraderTimeout: it ran too long; its process was killed and replaced.
            GraderCrash: its process died; it was replaced.
        """
        frame = pickle.dumps((function, arguments))
        limit = self._timeout_s if timeout_s is None else timeout_s
        idle = self._idle = self._idle or self._fill()
        process = await idle.get()
        answered = False
        try:
            if process is not None and not process.is_alive:
                await self._discard(process)  # killed from outside while it was idle
                process = None
            process = process or await self._start()
            kind, value = await process.run(frame, what=what, timeout_s=limit, start_timeout_s=self._start_timeout_s)
            answered = True
        except (GraderTimeout, GraderCrash) as error:
            logger.warning("%s", error)
            raise
        finally:
            idle.put_nowait(process if answered else None)
            if not answered and process is not None:
                await self._discard(process)
        if kind == "error":
            raise VerifierError(f"The reward of {what} raised {value}")
        return value

    async def aclose(self) -> None:
        """Kill every process; a later call starts new ones."""
        processes, self._processes, self._idle = self._processes, set(), None
        for process in processes:
            process.kill()
        await asyncio.gather(*(process.reaped() for process in processes))

    def _fill(self) -> asyncio.Queue[_Process | None]:
        idle: asyncio.Queue[_Process | None] = asyncio.Queue()
        for _ in range(self.num_workers):
            idle.put_nowait(None)  # a place whose process starts when it is needed
        return idle

    async def _start(self) -> _Process:
        process = await _Process.start()
        self._processes.add(process)
        return process

    async def _discard(self, process: _Process) -> None:
        self.num_replaced += 1
        process.kill()
        await process.reaped()
        self._processes.discard(process)


class _Process:
    """One grader process and the socket to it."""

    def __init__(
        self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self.pid = process.pid
        self._is_killed = False

    @classmethod
    async def start(cls) -> _Process:
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(  # noqa: ASYNC220  (returns at once; asyncio's own needs the main thread)
                [sys.executable, "-c", _PROGRAM, str(theirs.fileno()), str(os.getpid()), json.dumps(sys.path)],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for the owner, and the whole group can be killed
            )
        reader, writer = await asyncio.open_connection(sock=ours)
        return cls(process, reader, writer)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    async def run(self, frame: bytes, *, what: str, timeout_s: float, start_timeout_s: float) -> tuple[str, Any]:
        """("value", result) or ("error", text)."""
        try:
            self._writer.write(HEADER.pack(len(frame)) + frame)
            first = await self._receive(start_timeout_s, f"The grader of {what} did not start within")
            if first != b"ready":
                return pickle.loads(first)
            return pickle.loads(await self._receive(timeout_s, f"The reward of {what} took longer than"))
        except (EOFError, OSError) as error:
            raise GraderCrash(f"The process that graded {what} died{await self._exit_reason()}.") from error

    async def _receive(self, timeout_s: float, complaint: str) -> bytes:
        try:
            async with asyncio.timeout(timeout_s):
                (size,) = HEADER.unpack(await self._reader.readexactly(HEADER.size))
                return await self._reader.readexactly(size)
        except TimeoutError as error:
            raise GraderTimeout(f"{complaint} {timeout_s:g} s; its process was killed and replaced.") from error

    async def _exit_reason(self) -> str:
        self.kill()
        code = await self.reaped()
        if code is None:
            return ""
        return f" with signal {signal.Signals(-code).name}" if code < 0 else f" with exit code {code}"

    def kill(self) -> None:
        """Kill the process and all that it started; once only, for later its id may be another's."""
        if self._is_killed:
            return
        self._is_killed = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._writer.close()

    async def reaped(self) -> int | None:
        """The exit code once the dead process is collected; None if the kernel has not let go of it in 5 s."""
        for _ in range(500):
            if (code := self._process.poll()) is not None:
                return code
            await asyncio.sleep(0.01)
        return None
