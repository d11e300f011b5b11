"""One engine rank's side of the commit protocol.

Two threads meet here under one lock: a thread of ours that answers the leader's control connection while requests run
(table, prepare, verify, finalize, adopt, discard), and the engine's own thread, which calls `run` through SGLang's
custom loader while generation is paused (attach, commit, undo, check). Only the latter touches parameters.
"""

from __future__ import annotations

import json
import os
import threading
from typing import Any, cast

import torch

from ..bits import as_signed
from ..collective import host_id
from ..errors import WeightSyncError
from ..transports import Inbox, make_inbox
from ..wire import Channel, ConnectionLost, Message
from . import derived
from .live import Live, LiveError, checksum
from .staging import Order, Staged, StagingFault
from .table import Table

_DIAL_S = 10.0
_KEPT_OUTCOMES = 8


class Refused(Exception):
    """The leader asked for something that would break the protocol."""


class Receiver:
    """Everything that one rank knows about versions: what it serves, what is staged, and who may command it."""

    def __init__(self, *, rank: int, world: int) -> None:
        self._rank, self._world = rank, world
        self._lock = threading.RLock()
        self._live = Live()
        self._serves: dict[str, Any] = {"version": None, "content": None}
        self._is_broken = False
        self._has_served = False
        """The engine was seen serving what it had loaded itself, so that this is whole."""
        self._epoch = 0
        self._staged: Staged | None = None
        self._tables: dict[str, Table] = {}
        self._inboxes: dict[str, Inbox] = {}
        self._owner: tuple[str, Channel] | None = None
        self._outcomes: dict[str, Message] = {}

    def run(self, model: torch.nn.Module, command: Message) -> None:
        """Carry out a command in the engine's thread. Never raises: the answer is kept for the leader to ask for."""
        with self._lock:
            try:
                match command["op"]:
                    case "attach":
                        self._live.serve(model, str(command["role"]))
                        self._attach(command)
                        return
                    case "commit":
                        self._owned(command)
                        answer = self._commit(int(command["epoch"]))
                    case "undo":
                        self._owned(command)
                        answer = self._undo()
                    case "check":
                        self._owned(command)
                        answer = self._check(self._tables[str(command["plan"])])
                    case other:
                        raise Refused(f"unknown command `{other}`")
            except Exception as error:  # an exception that leaves here ends the engine
                answer = {"error": _describe(error)}
            self._outcomes[str(command.get("nonce"))] = answer
            for nonce in list(self._outcomes)[:-_KEPT_OUTCOMES]:
                del self._outcomes[nonce]

    @property
    def state(self) -> Message:
        """What the leader must know to recover this rank."""
        staged = self._staged
        pending = staged.order if staged is not None and staged.state == "swapped" else None
        return {
            **self._serves,
            "epoch": self._epoch,
            "pending": {"version": pending.version, "content": pending.content} if pending else None,
            "broken": self._is_broken,
            "known": self._serves["content"] is not None or (self._has_served and self._epoch > 0),
        }

    def close(self) -> None:
        """Hang up and give all memory back; what is live stays."""
        with self._lock:
            self._dismiss()
            self._drop()
            for inbox in self._inboxes.values():
                inbox.close()
            self._inboxes.clear()

    def _attach(self, command: Message) -> None:
        """Call a new leader, unless another one is in the middle of a push."""
        token = str(command["token"])
        busy = self._owner is not None and self._staged is not None and not self._owner[1].is_closed
        refusal = "another sender is in the middle of a push to this engine" if busy and self._owner else None
        try:
            channel = Channel.connect(str(command["host"]), int(command["port"]), timeout_s=_DIAL_S)
            hello: Message = {"op": "hello", "token": token, "rank": self._rank, "refused": refusal}
            if refusal is not None:
                channel.send(hello)
                channel.close()
                return
            self._dismiss()
            self._has_served |= bool(command.get("serving"))
            channel.send(hello | self._about())
        except (OSError, ConnectionLost):
            return  # the leader misses the hello and says which rank it missed
        self._owner = (token, channel)
        thread = threading.Thread(target=self._listen, args=(channel,), name="weightsync receiver", daemon=True)
        thread.start()

    def _about(self) -> Message:
        target = self._live.models.get("target")
        return {
            "world": self._world,
            "host": host_id(),
            "pid": os.getpid(),
            "config": _config_of(target),
            "params": {
                name: [list(tensor.shape), str(tensor.dtype).removeprefix("torch.")]
                for name, tensor in self._live.parameters().items()
            },
            "state": self.state,
        }

    def _listen(self, channel: Channel) -> None:
        try:
            while True:
                message = channel.receive()
                channel.send({"id": message.get("id"), **self._answer(channel, message)})
        except ConnectionLost:
            with self._lock:
                if self._owner is not None and self._owner[1] is channel:
                    self._dismiss()
        finally:
            channel.close()

    def _answer(self, channel: Channel, message: Message) -> Message:
        with self._lock:
            try:
                if self._owner is None or self._owner[1] is not channel:
                    raise Refused("another sender has taken over")
                return self._handle(message)
            except Exception as error:  # the boundary of this thread: whatever it is, the leader must hear of it
                return {"error": _describe(error)}

    def _handle(self, message: Message) -> Message:
        match message["op"]:
            case "state":
                return {"state": self.state}
            case "outcome":  # what a command in the engine's thread came to; None when it has not run
                return {"outcome": self._outcomes.get(str(message["nonce"])), "state": self.state}
            case "table":
                table = Table.from_json(message["table"])
                self._tables = {table.plan: table}
                return {}
            case "prepare":
                return self._prepare(message)
            case "verify":
                return self._verify(message)
            case "finalize":
                return self._finalize(message)
            case "adopt":
                return self._adopt(message)
            case "discard":
                self._discard()
                return {}
            case other:
                raise Refused(f"unknown question `{other}`")

    def _prepare(self, message: Message) -> Message:
        order = Order(
            epoch=int(message["epoch"]),
            version=int(message["version"]),
            content=str(message["content"]),
            base=message["base"],
            sizes=None if message["sizes"] is None else tuple(cast("list[int]", message["sizes"])),
        )
        if order.epoch <= self._epoch:
            raise Refused(f"epoch {order.epoch} is over; this rank has seen {self._epoch}")
        if order.base is not None and (order.base != self._serves["content"] or self._is_broken):
            raise Refused(
                f"a delta on {order.base} cannot be applied: this rank serves {self._serves['content']}. Push it full."
            )
        table = self._tables.get(str(message["plan"]))
        if table is None:
            raise Refused(f"plan {message['plan']} is not known here")
        self._discard()
        self._epoch = order.epoch
        inbox = self._inbox(str(message["transport"]))
        for other in self._inboxes.values():
            other.fence(order.epoch)
        nbytes = table.nbytes if order.sizes is None else sum(order.sizes)
        region = inbox.register(nbytes, epoch=order.epoch)
        self._staged = Staged(order, table, self._live, inbox, region)
        if self._live.is_on_gpu and order.sizes is None:
            self._staged.pin()
        return {"region": region.to_json()}

    def _verify(self, message: Message) -> Message:
        staged = self._current(int(message["epoch"]))
        digests = [(str(sent), str(content)) for sent, content in message["digests"]]
        staged.verify(digests, message["lengths"], float(message["timeout_s"]))
        return {}

    def _finalize(self, message: Message) -> Message:
        """Every rank of the engine has committed: from here on the new version is what this rank serves."""
        staged = self._staged
        if staged is None and self._serves["content"] == message["content"]:
            return {}  # heard twice
        if staged is None or staged.state != "swapped" or staged.order.content != message["content"]:
            raise Refused(f"there is no commit of {message['content']} to finalize")
        self._serves = {"version": staged.order.version, "content": staged.order.content}
        self._is_broken = False
        self._drop()
        return {}

    def _adopt(self, message: Message) -> Message:
        """What the engine loaded itself has been compared: it is a version that the leader pushed to others."""
        if self._serves["content"] is not None or self._is_broken or self._staged is not None:
            raise Refused(f"this rank serves {self._serves['content']}; there is nothing to adopt")
        self._serves = {"version": int(message["version"]), "content": str(message["content"])}
        return {}

    def _commit(self, epoch: int) -> Message:
        staged = self._current(epoch)
        if staged.state != "verified":
            raise Refused(f"epoch {epoch} is {staged.state}, not verified")
        try:
            seconds = staged.commit()
        except StagingFault:
            self._is_broken = self._is_broken or staged.is_broken
            self._drop()
            raise
        return {"seconds": seconds}

    def _undo(self) -> Message:
        staged = self._staged
        if staged is not None and staged.state == "swapped":
            try:
                staged.put_back()
            except StagingFault:
                self._is_broken = True
                raise
            finally:
                self._drop()
        return {}

    def _check(self, table: Table) -> Message:
        """Checksums of every piece, what no piece covers, and derived tensors that are out of date."""
        pieces = [piece for bucket in table.buckets for piece in bucket.pieces]
        self._live.check(pieces)
        sums: list[str] = []
        covered: dict[str, list[int]] = {}
        for piece, block in self._live.blocks(pieces):
            sums.append(checksum(block))
            counts = covered.setdefault(piece.param, [0, 0])
            counts[0] += block.numel()
            counts[1] += int(block.count_nonzero())
        missing: list[str] = []
        padding: list[str] = []
        for name, tensor in self._live.parameters().items():
            elements, nonzero = covered.get(name, [0, 0])
            if elements == 0:
                missing.append(name)
            if elements < tensor.numel() and int(as_signed(tensor).count_nonzero()) != nonzero:
                padding.append(name)
        stale = derived.stale(self._live.models)
        return {"sums": sums, "missing": missing, "padding": padding, "stale": stale}

    def _owned(self, command: Message) -> None:
        if self._owner is None or self._owner[0] != command["token"]:
            raise Refused("this sender does not own the rank: it lost its connection, or another one attached")

    def _current(self, epoch: int) -> Staged:
        if self._staged is None or self._staged.order.epoch != epoch:
            raise Refused(f"nothing is staged for epoch {epoch}; this rank has seen {self._epoch}")
        return self._staged

    def _dismiss(self) -> None:
        """The leader is gone: what is not in the parameters is of no use; what is waits for the next leader."""
        if self._owner is not None:
            self._owner[1].close()
        self._owner = None
        self._tables = {}
        if self._staged is not None and self._staged.state != "swapped":
            self._drop()

    def _discard(self) -> None:
        if self._staged is not None and self._staged.state == "swapped":
            raise Refused("the parameters hold a commit that is neither finalized nor undone")
        self._drop()

    def _drop(self) -> None:
        staged, self._staged = self._staged, None
        if staged is not None:
            staged.release()

    def _inbox(self, name: str) -> Inbox:
        if name not in self._inboxes:
            assert self._owner is not None, "only an owner prepares"
            # The address by which this rank reached the leader is one that senders reach.
            options = {} if name == "shm" else {"host": self._owner[1].local_host}
            self._inboxes[name] = make_inbox(name, **options)
        return self._inboxes[name]


def _config_of(model: torch.nn.Module | None) -> dict[str, object]:
    """The model's config as its checkpoint has it: on a CPU, SGLang pads sizes in place and keeps what they were."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "to_dict"):
        return {}
    found = cast("dict[str, object]", config.to_dict())
    for key in [key for key in found if key.startswith("original_")]:
        name = {"total_num_kv_heads": "num_key_value_heads"}.get(key[9:], key[9:])
        if name in found:
            found[name] = found[key]
    return {key: value for key, value in found.items() if _is_json(value)}


def _is_json(value: object) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def _describe(error: Exception) -> str:
    known = (Refused, StagingFault, LiveError, WeightSyncError)
    return str(error) if isinstance(error, known) else f"{type(error).__name__}: {error}"
