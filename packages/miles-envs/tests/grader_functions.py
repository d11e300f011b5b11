"""Reward functions that a grader process imports by name."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path


def by_text(prompt, messages):
    """Behave as the last message says."""
    text = messages[-1]["content"]
    match text:
        case "hang":
            time.sleep(1000)
        case "hang in C":
            re.match(r"(a+)+$", "a" * 40 + "b")
        case "crash":
            ctypes.string_at(0)
        case "exit":
            sys.exit(3)
        case "die":
            os._exit(7)
        case "raise":
            raise ZeroDivisionError("nothing to divide by")
    return float(text)


def returned(value):
    return value


def thread_and_alarm() -> tuple[bool, bool]:
    """Whether tasks run on the main thread and an alarm goes off."""
    fired = []
    signal.signal(signal.SIGALRM, lambda *_: fired.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    signal.sigtimedwait([], 0.05)
    return threading.current_thread() is threading.main_thread(), bool(fired)


def spawn_and_hang(note: str) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    Path(note).write_text(str(child.pid))
    time.sleep(1000)


def pid() -> int:
    return os.getpid()


def with_bonus(prompt, messages, *, bonus=0):
    return float(messages[-1]["content"]) + bonus
