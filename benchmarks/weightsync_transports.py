"""The part `transports` of weightsync.py; run as a script, it is the receiving process of one transport."""

from __future__ import annotations

import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from contextlib import ExitStack

import numpy as np
from miles_weightsync.errors import MissingDependency, WeightSyncError
from miles_weightsync.transports import TRANSPORTS, Region, make_outbox

BUCKET = 64 << 20
PLAIN = "plain socket"
GPU = {"nccl", "cupy_nccl", "cuda_ipc"}

Row = dict[str, float]


def measure(*, quick: bool = False) -> dict[str, Row]:
    nbytes, rounds = (BUCKET * 2, 2) if quick else (1 << 30, 7)
    data = np.random.default_rng(0).integers(0, 256, nbytes, dtype=np.uint8)
    with ExitStack() as stack:
        ways: dict[str, Callable[[], float]] = {"memcpy": copy_in_memory(data)}
        ways["loopback, 1 stream"] = stack.enter_context(PlainSocket(data))
        if shutil.which("iperf3"):
            ways["iperf3, 1 stream"] = stack.enter_context(Iperf(nbytes))
        for name in TRANSPORTS:
            if name not in GPU and is_installed(name):
                for variant, options in VARIANTS.get(name, {name: {}}).items():
                    ways[variant] = stack.enter_context(Transport(name, data, options))
        seen: dict[str, list[Row]] = {name: [] for name in ways}
        for _ in range(rounds + 1):
            for name, bring in ways.items():
                started, cpu = time.perf_counter(), sum(os.times()[:2])
                theirs = bring()
                seconds = getattr(bring, "seconds", time.perf_counter() - started)
                seen[name].append({"seconds": seconds, "cpu": sum(os.times()[:2]) - cpu + theirs})
    return {name: summary(rows[1:], seen, nbytes) for name, rows in seen.items()}


VARIANTS: dict[str, dict[str, dict[str, object]]] = {
    "shm": {"shm, 1 thread": {"threads": 1}, "shm, 2 threads": {"threads": 2}},
    "tcp": {"tcp, 1 stream": {"streams": 1}, "tcp, 2 streams": {"streams": 2}, "tcp, 4 streams": {"streams": 4}},
}


def summary(rows: list[Row], seen: dict[str, list[Row]], nbytes: int) -> Row:
    rates = [nbytes / row["seconds"] / 1e9 for row in rows]
    found = {
        "GB/s": statistics.median(rates),
        "best": max(rates),
        "CPU-s/GiB": statistics.median(row["cpu"] for row in rows) * (1 << 30) / nbytes,
    }
    for column, base in (
        ("of_memcpy", "memcpy"),
        ("of_loopback", "loopback, 1 stream"),
        ("of_iperf3", "iperf3, 1 stream"),
    ):
        if base in seen:
            others = seen[base][1:]
            found[column] = statistics.median(b["seconds"] / a["seconds"] for a, b in zip(rows, others, strict=True))
    return found


def is_installed(name: str) -> bool:
    try:
        make_outbox(name).close()
    except MissingDependency:
        return False
    return True


def copy_in_memory(data: np.ndarray) -> Callable[[], float]:
    target = np.zeros_like(data)

    def bring() -> float:
        for start in range(0, data.nbytes, BUCKET):
            np.copyto(target[start : start + BUCKET], data[start : start + BUCKET])
        return 0.0

    return bring


class Receiver:
    """The other process. Says what CPU time it used since it was asked last."""

    def __init__(self, name: str, nbytes: int) -> None:
        command = [sys.executable, __file__, name, str(nbytes)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.address = self._ask(None)

    def cpu(self) -> float:
        return float(self._ask("cpu"))

    def checksum(self) -> int:
        return int(self._ask("checksum"))

    def close(self) -> None:
        self._process.communicate()

    def _ask(self, word: str | None) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if word is not None:
            self._process.stdin.write(word + "\n")
            self._process.stdin.flush()
        return self._process.stdout.readline().strip()


class Transport:
    """One of ours. The bytes are compared when all rounds are over."""

    def __init__(self, name: str, data: np.ndarray, options: dict[str, object]) -> None:
        self._receiver, self._data = Receiver(name, data.nbytes), data
        self._region = Region.from_json(self._receiver.address)
        self._outbox = make_outbox(name, **options)

    def __enter__(self) -> Transport:
        return self

    def __call__(self) -> float:
        starts = range(0, self._data.nbytes, BUCKET)
        tickets = [self._outbox.write(self._region, start, self._data[start : start + BUCKET]) for start in starts]
        self._outbox.wait(tickets, timeout_s=120)
        return self._receiver.cpu()

    def __exit__(self, failure: object, *_: object) -> None:
        if failure is None and self._receiver.checksum() != zlib.crc32(self._data.data):
            raise WeightSyncError(f"{self._region} does not hold what was sent")
        self._outbox.close()
        self._receiver.close()


class PlainSocket:
    """What one connection does between two processes that do nothing else."""

    def __init__(self, data: np.ndarray) -> None:
        self._receiver, self._data = Receiver(PLAIN, data.nbytes), data
        self._socket = socket.create_connection(("127.0.0.1", int(self._receiver.address)))

    def __enter__(self) -> PlainSocket:
        return self

    def __call__(self) -> float:
        for start in range(0, self._data.nbytes, BUCKET):
            self._socket.sendall(self._data[start : start + BUCKET].data)
        self._socket.recv(1)
        return self._receiver.cpu()

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._receiver.close()


class Iperf:
    """iperf3 with one stream, which neither fills nor keeps the memory that it sends; its start is not counted."""

    def __init__(self, nbytes: int) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self._port = str(probe.getsockname()[1])
        command = ["iperf3", "--server", "--bind", "127.0.0.1", "--port", self._port]
        self._server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._nbytes = nbytes
        self.seconds = 0.0

    def __enter__(self) -> Iperf:
        return self

    def __call__(self) -> float:
        command = ["iperf3", "--client", "127.0.0.1", "--port", self._port, "--bytes", str(self._nbytes), "--json"]
        done = subprocess.run(command, capture_output=True, text=True)
        while done.returncode != 0:  # the server has not begun, or not finished with the last client
            time.sleep(0.1)
            done = subprocess.run(command, capture_output=True, text=True)
        self.seconds = float(json.loads(done.stdout)["end"]["sum_received"]["seconds"])
        return 0.0

    def __exit__(self, *_: object) -> None:
        self._server.terminate()
        self._server.wait()


def receive_plainly(nbytes: int) -> None:
    """Take `nbytes` over and over from one connection; the main thread of this process does all of it."""
    target, server = np.zeros(nbytes, np.uint8).data, socket.create_server(("127.0.0.1", 0))
    print(server.getsockname()[1], flush=True)
    connection, _ = server.accept()
    cpu = 0.0
    while True:
        done = 0
        while done < nbytes:
            received = connection.recv_into(target[done:])
            if not received:
                return
            done += received
        connection.sendall(b"k")
        sys.stdin.readline()
        print(sum(os.times()[:2]) - cpu, flush=True)
        cpu = sum(os.times()[:2])


def receive(name: str, nbytes: int) -> None:
    from miles_weightsync.transports import make_inbox

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # some transfer engines write their log to stdout
    inbox = make_inbox(name)
    region = inbox.register(nbytes, epoch=1)
    inbox.view(region)[:] = 0  # a page is made when first touched, which a second push does not pay
    print(region.to_json(), flush=True, file=answers)
    cpu = sum(os.times()[:2])
    for line in sys.stdin:
        if line.strip() == "cpu":
            now = sum(os.times()[:2])
            print(now - cpu, flush=True, file=answers)
            cpu = now
        else:
            print(zlib.crc32(inbox.view(region).data), flush=True, file=answers)
    inbox.close()


if __name__ == "__main__":
    if sys.argv[1] == PLAIN:
        receive_plainly(int(sys.argv[2]))
    else:
        receive(sys.argv[1], int(sys.argv[2]))
