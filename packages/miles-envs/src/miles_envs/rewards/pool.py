"""A fixed number of processes that run reward functions; one that hangs or crashes is killed and replaced.

call ─▶ idle process ─▶ function, arguments ─▶ begun ─▶ outcome ─▶ process idle again
                            │                    │
                      start timeout           timeout, crash, cancellation: killed, a new one takes its place
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

from .grader import BEGUN, HEADER

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
            process = await self._begin(process, frame, what)
            kind, value = await process.outcome(what=what, timeout_s=limit)
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

    async def _begin(self, process: _Process | None, frame: bytes, what: str) -> _Process:
        """The process that has begun with the call: the idle one, or a new one if that has died meanwhile."""
        if process is not None:
            if await process.accepts(frame, timeout_s=self._start_timeout_s):
                return process
            await self._discard(process)
        process = await _Process.start()
        self._processes.add(process)
        try:
            if await process.accepts(frame, timeout_s=self._start_timeout_s):
                return process
            if process.is_alive:
                raise GraderTimeout(f"The grader of {what} did not start within {self._start_timeout_s:g} s.")
            raise GraderCrash(f"The process that should grade {what} died{await process.exit_reason()}.")
        except BaseException:
            await self._discard(process)
            raise

    async def _discard(self, process: _Process) -> None:
        if process not in self._processes:
            return
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
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        return cls(process, reader, writer)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    async def accepts(self, frame: bytes, *, timeout_s: float) -> bool:
        """Send a call; whether the process has begun with it. False when it died or took longer than `timeout_s`."""
        try:
            self._writer.write(HEADER.pack(len(frame)) + frame)
            async with asyncio.timeout(timeout_s):
                return await self._receive() == BEGUN
        except (EOFError, OSError):
            return False

    async def outcome(self, *, what: str, timeout_s: float) -> tuple[str, Any]:
        """("value", result) or ("error", text) of the call that was accepted.

        Raises:
            GraderTimeout: none within `timeout_s`.
            GraderCrash: the process died.
        """
        try:
            async with asyncio.timeout(timeout_s):
                return pickle.loads(await self._receive())
        except TimeoutError as error:
            raise GraderTimeout(
                f"The reward of {what} took longer than {timeout_s:g} s; its process was killed and replaced."
            ) from error
        except (EOFError, OSError) as error:
            raise GraderCrash(f"The process that graded {what} died{await self.exit_reason()}.") from error

    async def _receive(self) -> bytes:
        (size,) = HEADER.unpack(await self._reader.readexactly(HEADER.size))
        return await self._reader.readexactly(size)

    async def exit_reason(self) -> str:
        """How the process ended, to append to a sentence."""
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
