"""Engines and senders in processes of their own that die at a given step."""

from __future__ import annotations

import os
import signal
import threading
from multiprocessing.connection import Connection
from typing import Any

import miles_weightsync.receiver.staging as staging
import torch
from die_with_parent import die_with_parent
from miles_weightsync import PushConfig, WeightSyncError
from miles_weightsync.engine import EngineClient
from miles_weightsync.push import Pusher
from miles_weightsync.receiver import Receiver
from miles_weightsync.staged.sender import Sender
from miles_weightsync.transports.onesided import OneSidedOutbox
from miles_weightsync.wire import Channel
from staged_bed import BedEngine, checkpoint, shards


class Fate:
    """Counts steps once armed, and kills the process at one of them."""

    def __init__(self) -> None:
        self.count = 0
        self.kill_at: int | str | None = None
        """The number of a step, or the name of the first that has it."""
        self._armed = False
        self._lock = threading.Lock()

    def arm(self, kill_at: int | str | None) -> None:
        self.count, self.kill_at, self._armed = 0, kill_at, True

    def step(self, name: str) -> None:
        with self._lock:
            if self._armed:
                if self.kill_at in (self.count, name):
                    os.kill(os.getpid(), signal.SIGKILL)
                self.count += 1

    def around(self, owner: Any, name: str) -> None:
        """A step before and a step after every call."""
        real = getattr(owner, name)

        def stepping(*args: Any, **kwargs: Any) -> Any:
            self.step(f"before {name}")
            result = real(*args, **kwargs)
            self.step(f"after {name}")
            return result

        setattr(owner, name, stepping)


def engine(pipe: Connection, tp: int) -> None:
    """Serve until the pipe closes. Takes `kill_at`, answers with the steps counted since the last one."""
    die_with_parent()
    torch.set_num_threads(1)
    fate = Fate()
    fate.around(Receiver, "_answer")
    real_swap = staging.swap

    def swap(*args: Any) -> Any:
        for step in real_swap(*args):
            yield step
            fate.step("swapped a chunk")

    staging.swap = swap
    fate.around(staging, "add")
    served = BedEngine(tp=tp, on_step=fate.step)
    pipe.send(served.url)
    try:
        while True:
            kill_at = pipe.recv()
            pipe.send(fate.count)
            fate.arm(kill_at)
    except EOFError:
        os._exit(0)


def sender(pipe: Connection, urls: list[str], config: PushConfig, kill_at: int | str | None) -> None:
    """Push version 1 whole, then version 2 with death at a step; answers with the steps that it took."""
    die_with_parent()
    torch.set_num_threads(1)
    fate = Fate()
    fate.around(EngineClient, "_call")
    fate.around(Channel, "send")
    fate.around(Sender, "_pack")
    fate.around(Sender, "_content")
    fate.around(OneSidedOutbox, "put")  # afterwards a write is on its way
    with Pusher(urls, config=config) as pusher:
        pusher.push(shards(checkpoint(1)), version=1)
        fate.arm(kill_at)
        try:
            pusher.push(shards(checkpoint(1, steps=1)), version=2)
            pipe.send((fate.count, None))
        except WeightSyncError as error:
            pipe.send((fate.count, str(error)))
