"""Run one command and take it down with everything it started when its owner is gone.

    owner ──pipe on stdin──▶ guard (leads a new session) ──▶ command ──▶ whatever the command starts

    python -I -S guard.py SCRATCH SHM_PREFIXES COMMAND…

The owner writes `T` to have the command terminated, and closes the pipe to have the whole session killed. A killed
owner closes the pipe as well, so `kill -9` of it leaves nothing behind. PR_SET_PDEATHSIG in the command alone would
not do: it is tied to the thread that started it and does not reach grandchildren. At the end the guard removes the
folder SCRATCH, which the command has for its temporary files, and the files of /dev/shm that the session had mapped and
whose names start with one of the comma-separated SHM_PREFIXES: SGLang leaves both behind, however it ends.

Standard library only: the file is run by path, without site-packages, which takes some 20 ms. The exit status is the
command's; 128 + n when signal n ended it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
OWNER_POLL_S = 1.0
NOT_STARTED = 127
SHM = "/dev/shm/"


def main(scratch: str, shm_prefixes: str, command: list[str]) -> int:
    owner = os.getppid()
    libc = ctypes.CDLL(None)
    # Orphans of the command come to this process, which reaps them: a container's first process often does not.
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    shared: set[str] = set()
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            # The guard has one thread, so running Python between fork and exec is safe, and the death signal (tied to
            # the starting thread) means "the guard was killed".
            preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL),
        )
        status = _wait(child, owner, shared, tuple(SHM + prefix for prefix in shm_prefixes.split(",") if prefix))
    except OSError as error:
        print(f"cannot start {command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        status = NOT_STARTED
    _kill_session()
    for path in shared:
        with contextlib.suppress(OSError):
            os.unlink(path)
    shutil.rmtree(scratch, ignore_errors=True)
    return status if status >= 0 else 128 - status


def _wait(child: subprocess.Popen[bytes], owner: int, shared: set[str], prefixes: tuple[str, ...]) -> int:
    """Wait until the command exits by itself or the owner closes the pipe.

    Shared memory is listed as soon as there is any, for a command that crashes, and again before the end.
    """
    exited = os.pidfd_open(child.pid)
    pipe = sys.stdin.fileno()
    while True:
        readable, _, _ = select.select([exited, pipe], [], [], OWNER_POLL_S)
        if exited in readable:
            return child.wait()
        orders = os.read(pipe, 1) if pipe in readable else None
        # A process that the owner forked without exec holds a copy of the pipe and keeps it open, hence getppid.
        gone = orders == b"" or os.getppid() != owner
        if orders or gone or not shared:
            shared.update(path for pid in _others() for path in _mapped(pid) if path.startswith(prefixes))
        if gone:
            child.kill()
            return child.wait()
        if orders:
            child.terminate()


def _kill_session() -> None:
    """Kill all that is left of this session, twice: something may have been starting in the first pass."""
    for _ in range(2):
        for pid in _others():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)


def session_members(session_id: int) -> list[int]:
    """Ids of the live processes of a session."""
    members: list[int] = []
    for entry in os.listdir("/proc"):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if entry.isdigit() and os.getsid(int(entry)) == session_id:
                members.append(int(entry))
    return members


def _others() -> list[int]:
    """The members of this session besides this process."""
    return [pid for pid in session_members(os.getpid()) if pid != os.getpid()]


def _mapped(pid: int) -> set[str]:
    """Files in the memory of a process."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as maps:
        return {line.split(maxsplit=5)[5].strip() for line in maps if "/" in line}
    return set()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
