"""What tests start ends with them, also when they are killed."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

OWNER = """
import os, signal, sys, time
sys.path.insert(0, sys.argv[1])
from transport_peer import Peer
peer = Peer("shm")
peer("register", nbytes=1, epoch=0)  # it runs
peer.process.send_signal(signal.SIGSTOP)  # a busy one would not notice either that its owner is gone
print(peer.process.pid, flush=True)
time.sleep(600)
"""


def test_kill_9_of_a_test_ends_the_processes_that_it_has_started() -> None:
    command = [sys.executable, "-c", OWNER, str(Path(__file__).parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        process = os.pidfd_open(int(owner.stdout.readline()))
        owner.kill()
    assert select.select([process], [], [], 20)[0], "the peer lives on"
    os.close(process)
