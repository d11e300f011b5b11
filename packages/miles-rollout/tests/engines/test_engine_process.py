from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest
from miles_rollout.engines.process import OwnedProcess

FAMILY = """
import os, signal, subprocess, sys, time
if "stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
other_group = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], process_group=0)
open(os.path.join(os.environ["TMPDIR"], "scratch"), "w").close()
print("pids", os.getpid(), child.pid, other_group.pid, os.environ["TMPDIR"], flush=True)
time.sleep(600)
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., OwnedProcess]]:
    started: list[OwnedProcess] = []

    def start(source: str, *arguments: str) -> OwnedProcess:
        command = [sys.executable, "-c", textwrap.dedent(source), *arguments]
        started.append(OwnedProcess(command, log_path=tmp_path / "log" / "it.log"))
        return started[-1]

    yield start
    for process in started:
        process.stop(grace_s=0)


def eventually(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Wait for another process to get somewhere."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def family(process: OwnedProcess) -> tuple[list[int], Path]:
    """Ids of the three processes of FAMILY and their folder, once it runs."""
    eventually(lambda: "pids" in process.log_tail())
    _, *pids, scratch = process.log_tail(1).split()
    return [int(pid) for pid in pids], Path(scratch)


def alive(pids: Sequence[int]) -> list[int]:
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize("nature", ["docile", "stubborn"])
def test_stop_leaves_no_process_and_no_file(start: Callable[..., OwnedProcess], nature: str):
    process = start(FAMILY, nature)
    pids, scratch = family(process)
    assert len(alive(pids)) == 3
    assert (scratch / "scratch").exists()
    status = process.stop(grace_s=0.3)
    assert status == 128 + (signal.SIGTERM if nature == "docile" else signal.SIGKILL)
    assert alive(pids) == []
    assert not scratch.exists()
    assert process.stop() == status


def test_a_process_that_ends_by_itself_leaves_no_child(start: Callable[..., OwnedProcess]):
    process = start(FAMILY.rpartition("time.sleep")[0] + "sys.exit(3)")
    assert process.wait(20) == 3
    pids, scratch = family(process)
    assert alive(pids) == []
    assert not scratch.exists()


def test_kill_9_of_the_guard_kills_the_command_and_stop_the_rest(start: Callable[..., OwnedProcess]):
    process = start(FAMILY)
    pids, _ = family(process)
    os.kill(process.session_id, signal.SIGKILL)
    eventually(lambda: not alive(pids[:1]))
    assert process.stop() == 128 + signal.SIGKILL
    eventually(lambda: not alive(pids))


@pytest.mark.parametrize("has_forked_child", [False, True])
def test_kill_9_of_the_owner_leaves_nothing(tmp_path: Path, has_forked_child: bool):
    log = tmp_path / "it.log"
    owner_source = f"""
    import os, sys, time
    from pathlib import Path
    from miles_rollout.engines.process import OwnedProcess
    process = OwnedProcess([sys.executable, "-c", {FAMILY!r}], log_path=Path({str(log)!r}))
    if {has_forked_child} and os.fork() == 0:   # holds a copy of the pipe to the guard
        time.sleep(20)
        os._exit(0)
    print(process.session_id, flush=True)
    time.sleep(600)
    """
    owner = subprocess.Popen([sys.executable, "-c", textwrap.dedent(owner_source)], stdout=subprocess.PIPE, text=True)
    with owner:
        assert owner.stdout is not None
        guard = int(owner.stdout.readline())
        eventually(lambda: log.exists() and "pids" in log.read_text())
        pids = [guard, *(int(word) for word in log.read_text().split()[1:4])]
        assert len(alive(pids)) == 4
        owner.kill()
        eventually(lambda: not alive(pids))


def test_a_command_that_does_not_exist_says_so(tmp_path: Path):
    process = OwnedProcess(["/no/such/program"], log_path=tmp_path / "it.log")
    assert process.wait(20) == 127
    assert "cannot start /no/such/program: No such file" in process.log_tail()


def test_the_tail_of_a_log_starts_at_the_last_start(tmp_path: Path):
    log = tmp_path / "it.log"
    log.write_text("from the run before\n")
    process = OwnedProcess([sys.executable, "-c", "print('one\\n\\ntwo\\nthree')"], log_path=log)
    assert process.wait(20) == 0
    assert process.log_tail(2) == "two\nthree"
    assert process.log_tail() == "one\ntwo\nthree"
    assert log.read_text().startswith("from the run before")
    process.stop()


def test_a_port_belongs_to_the_process_that_listens_on_it(start: Callable[..., OwnedProcess]):
    listener = start("""
        import socket, time
        server = socket.create_server(("127.0.0.1", 0))
        print("port", server.getsockname()[1], flush=True)
        time.sleep(600)
    """)
    eventually(lambda: "port" in listener.log_tail())
    port = int(listener.log_tail().split()[1])
    other = start("import time; time.sleep(600)")
    assert listener.listens_on(port)
    assert not other.listens_on(port)


def test_shared_memory_of_a_crashed_command_is_removed(tmp_path: Path):
    prefix = f"miles_test_{os.getpid()}_"
    path = Path("/dev/shm", f"{prefix}loads")
    other = Path("/dev/shm", f"other_{prefix}")
    source = f"""
    import mmap, sys
    kept = []
    for path in ({str(path)!r}, {str(other)!r}):
        with open(path, "w+b") as file:
            file.write(bytes(4096))
            file.flush()
            kept.append(mmap.mmap(file.fileno(), 4096))
    print("mapped", flush=True)
    sys.stdin = open({str(tmp_path / "go")!r})   # a pipe: waits until the test opens it
    sys.exit(5)
    """
    os.mkfifo(tmp_path / "go")
    command = [sys.executable, "-c", textwrap.dedent(source)]
    process = OwnedProcess(command, log_path=tmp_path / "it.log", shm_prefixes=["unrelated", prefix])
    try:
        eventually(lambda: "mapped" in process.log_tail())
        assert process.wait(2.5) is None  # the guard looks every second
        with (tmp_path / "go").open("w"):
            assert process.wait(20) == 5
        assert not path.exists()
        assert other.exists()
    finally:
        process.stop(grace_s=0)
        other.unlink()
