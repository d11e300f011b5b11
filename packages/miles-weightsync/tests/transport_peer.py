"""One end of a transport in a process of its own, which a test drives by lines of JSON and may kill.

python transport_peer.py        reads {"call": name, …} from stdin, answers {"value": …} or {"error": …, "text": …}
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from die_with_parent import die_with_parent
from miles_weightsync.errors import WeightSyncError
from miles_weightsync.transports import Inbox, Outbox, Region, Ticket, make_inbox, make_outbox


def pattern(seed: int, nbytes: int) -> np.ndarray:
    """[nbytes] uint8 that only this seed gives."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


class Peer:
    """A process with an inbox and an outbox of one transport, made when first used."""

    def __init__(self, transport: str, *, inbox: dict[str, Any] | None = None, outbox: dict[str, Any] | None = None):
        command = [sys.executable, __file__, transport, json.dumps(inbox or {}), json.dumps(outbox or {})]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._num_unanswered = 0

    def __call__(self, call: str, **arguments: Any) -> Any:
        """Have the peer do something and return what it answers; its errors are raised as PeerError."""
        self.tell(call, **arguments)
        return self.answer()

    def tell(self, call: str, **arguments: Any) -> None:
        assert self.process.stdin is not None
        self._num_unanswered += 1
        self.process.stdin.write(json.dumps({"call": call, **arguments}) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise EOFError(f"peer {self.process.pid} has ended")
        found = json.loads(line)
        self._num_unanswered -= 1
        if "error" in found:
            raise PeerError(found["error"], found["text"])
        return found["value"]

    def flood(self, region: str, *, seed: int) -> None:
        """Have it write a region over and over; returns when that has begun. `answer` gives the end."""
        self("flood", region=region, seed=seed, timeout_s=20)
        self._num_unanswered += 1

    @property
    def is_idle(self) -> bool:
        """It lives and has answered everything."""
        return self.process.poll() is None and self._num_unanswered == 0

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


class PeerError(Exception):
    """An error in the peer: its type and its text."""


def own_stdout() -> TextIO:
    """What this process answers on; whatever else is written to stdout goes to stderr, such as logs of engines."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


answers = sys.stdout


class Calls:
    """What a peer can be told to do."""

    def __init__(self, transport: str, inbox: dict[str, Any], outbox: dict[str, Any]) -> None:
        self._made: dict[str, Any] = {}
        self._transport, self._options = transport, {"inbox": inbox, "outbox": outbox}
        self._tickets: list[Ticket] = []

    @property
    def inbox(self) -> Inbox:
        if "inbox" not in self._made:
            self._made["inbox"] = make_inbox(self._transport, **self._options["inbox"])
        return self._made["inbox"]

    @property
    def outbox(self) -> Outbox:
        if "outbox" not in self._made:
            self._made["outbox"] = make_outbox(self._transport, **self._options["outbox"])
        return self._made["outbox"]

    def register(self, nbytes: int, epoch: int) -> str:
        return self.inbox.register(nbytes, epoch=epoch).to_json()

    def equals(self, region: str, offset: int, nbytes: int, seed: int) -> bool:
        found = self.inbox.view(Region.from_json(region))[offset : offset + nbytes]
        return bool(np.array_equal(found, pattern(seed, nbytes)))

    def fence(self, epoch: int) -> None:
        self.inbox.fence(epoch)

    def write(self, region: str, offset: int, nbytes: int, seed: int) -> int:
        self._tickets.append(self.outbox.write(Region.from_json(region), offset, pattern(seed, nbytes)))
        return len(self._tickets) - 1

    def wait(self, timeout_s: float) -> None:
        tickets, self._tickets = self._tickets, []
        self.outbox.wait(tickets, timeout_s=timeout_s)

    def flood(self, region: str, seed: int, timeout_s: float) -> int:
        """Write the whole region over and over until it fails; returns how often it did not."""
        target = Region.from_json(region)
        data = pattern(seed, target.nbytes)
        for done in range(1_000_000):
            if done == 1:
                print(json.dumps({"value": "begun"}), flush=True, file=answers)
            try:
                self.outbox.wait([self.outbox.write(target, 0, data)], timeout_s=timeout_s)
            except WeightSyncError:
                return done
        raise AssertionError("nothing ever stopped it")

    def reset(self) -> None:
        """Close both ends, for the next test."""
        self._tickets = []
        for made in (self._made.pop("outbox", None), self._made.pop("inbox", None)):
            if made is not None:
                made.close()

    def cancel(self, region: str) -> None:
        self.outbox.cancel(Region.from_json(region))


def main() -> None:
    global answers
    answers = own_stdout()
    die_with_parent()
    calls = Calls(sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3]))
    for line in sys.stdin:
        arguments = json.loads(line)
        try:
            answer = {"value": getattr(calls, arguments.pop("call"))(**arguments)}
        except WeightSyncError as error:
            answer = {"error": type(error).__name__, "text": str(error)}
        print(json.dumps(answer), flush=True, file=answers)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
