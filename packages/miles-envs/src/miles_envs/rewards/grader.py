"""The process that runs reward functions; started by `RewardPool`, it lives no longer than its owner.

Tasks run on the main thread, so functions that need signals work. A second thread reads the socket and ends the
process, and whatever the function started, as soon as the owner is gone.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import queue
import signal
import socket
import struct
import threading
import traceback

HEADER = struct.Struct(">Q")
"""Length of the frame behind it."""
BEGUN = b"begun"
_PR_SET_PDEATHSIG = 1


def main(descriptor: int, owner: int) -> None:
    """Serve the owner with process id `owner` over the socket `descriptor` until it goes away."""
    _die_with(owner)
    connection = socket.socket(fileno=descriptor)
    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read_forever, args=(connection, requests), daemon=True).start()
    while True:
        frame = requests.get()
        _send(connection, _load_and_run(connection, frame))


def _load_and_run(connection: socket.socket, frame: bytes) -> bytes:
    """Unpickle a call (which imports what it needs), say that it begins, run it; the pickled outcome."""
    begun = False
    try:
        function, arguments = pickle.loads(frame)
        _send(connection, BEGUN)
        begun = True
        return pickle.dumps(("value", function(*arguments)))
    except BaseException as error:  # the boundary to a user's code; SystemExit must not end the process either
        if not begun:
            _send(connection, BEGUN)
        return pickle.dumps(("error", _describe(error)))


def _describe(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"


def _read_forever(connection: socket.socket, requests: queue.SimpleQueue[bytes]) -> None:
    with connection.makefile("rb") as stream:
        while len(header := stream.read(HEADER.size)) == HEADER.size:
            (size,) = HEADER.unpack(header)
            frame = stream.read(size)
            if len(frame) < size:
                break
            requests.put(frame)
    os.killpg(0, signal.SIGKILL)  # the owner started this process as the leader of a group of its own


def _send(connection: socket.socket, frame: bytes) -> None:
    connection.sendall(HEADER.pack(len(frame)) + frame)


def _die_with(owner: int) -> None:
    """Have the kernel kill this process with its owner, also while a C function holds the interpreter."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "prctl"):
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != owner:
        os._exit(1)
