"""Goodbyes: when memory that nobody can lock is its receiver's alone, shown with an engine that a test holds up."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
from miles_weightsync.errors import TransportError, TransportTimeout
from miles_weightsync.transports import onesided
from miles_weightsync.transports.base import Bytes, Region
from miles_weightsync.transports.onesided import Description, OneSidedInbox, OneSidedOutbox


@dataclass
class Engine:
    """Writes within this process, when it is let."""

    may_finish: threading.Event = field(default_factory=threading.Event)
    has_begun: threading.Event = field(default_factory=threading.Event)
    registered: set[int] = field(default_factory=set)
    refuses: str = ""

    def describe(self, data: Bytes) -> Description:
        return {"name": "here", "pointer": data.ctypes.data}

    def register(self, data: Bytes) -> None:
        self.registered.add(data.ctypes.data)

    def unregister(self, data: Bytes) -> None:
        self.registered.remove(data.ctypes.data)

    def progress(self) -> None:
        pass

    def open(self, description: Description) -> object:
        return description["name"]

    def submit(self, target: object, pointer: int, data: Bytes) -> object:
        assert target == "here"
        assert data.ctypes.data in self.registered
        if self.refuses:
            raise TransportError(self.refuses)
        self.has_begun.set()
        return pointer, data

    def is_done(self, handle: object) -> bool:
        if not self.may_finish.is_set():
            return False
        pointer, data = handle  # pyright: ignore[reportGeneralTypeIssues]
        ctypes.memmove(pointer, data.ctypes.data, data.nbytes)
        return True


class Inbox(OneSidedInbox):
    transport = "mooncake"


class Outbox(OneSidedOutbox):
    transport = "mooncake"


Ends = tuple[Engine, Inbox, Outbox]


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ends]:
    monkeypatch.setattr(onesided, "_LEAVE_S", 0.2)
    monkeypatch.setattr(OneSidedInbox, "patience_s", 0.3)
    engine = Engine()
    inbox, outbox = Inbox(engine, host="127.0.0.1"), Outbox(engine)
    yield engine, inbox, outbox
    outbox.close()
    inbox.close()


def pointer(inbox: Inbox, region: Region) -> int:
    return inbox.view(region).ctypes.data


def test_memory_is_used_again_when_every_sender_has_said_goodbye(ends: Ends) -> None:
    engine, inbox, outbox = ends
    engine.may_finish.set()
    region = inbox.register(100, epoch=0)
    outbox.wait([outbox.write(region, 0, np.full(100, 7, np.uint8))], timeout_s=5)
    before = pointer(inbox, region)
    inbox.release(region)  # the sender has not cancelled: it is asked to stop
    again = inbox.register(50, epoch=1)
    assert pointer(inbox, again) == before
    assert inbox.lost_bytes == 0
    outbox.wait([outbox.write(again, 0, np.full(50, 8, np.uint8))], timeout_s=5)
    assert inbox.view(again).tolist() == [8] * 50
    outbox.close()
    inbox.close()
    assert engine.registered == set()


def test_a_write_under_way_when_its_epoch_ends_lands_before_the_memory_is_used_again(ends: Ends) -> None:
    engine, inbox, outbox = ends
    region = inbox.register(100, epoch=0)
    ticket = outbox.write(region, 0, np.full(100, 7, np.uint8))
    assert engine.has_begun.wait(5)
    inbox.fence(1)
    threading.Timer(0.05, engine.may_finish.set).start()
    inbox.seal(region, timeout_s=5)
    assert inbox.view(region).tolist() == [7] * 100
    outbox.wait([ticket], timeout_s=5)  # it did arrive, although too late for its epoch
    with pytest.raises(TransportError, match="takes no writes any more"):
        outbox.wait([outbox.write(region, 0, np.full(100, 9, np.uint8))], timeout_s=5)


def test_memory_of_a_write_that_never_ends_is_kept_aside(ends: Ends) -> None:
    engine, inbox, outbox = ends
    region = inbox.register(100, epoch=0)
    before = pointer(inbox, region)
    ticket = outbox.write(region, 0, np.full(100, 7, np.uint8))
    assert engine.has_begun.wait(5)
    started = time.monotonic()
    outbox.cancel(region)
    assert time.monotonic() - started < 2
    assert "was cancelled" in str(ticket.error)
    with pytest.raises(TransportTimeout, match=r"may still change after .* a sender died or stands still"):
        inbox.seal(region, timeout_s=0.5)
    inbox.fence(1)
    inbox.release(region)
    assert inbox.lost_bytes == 100
    again = inbox.register(100, epoch=1)
    assert pointer(inbox, again) != before
    engine.may_finish.set()
    outbox.wait([outbox.write(again, 0, np.full(100, 9, np.uint8))], timeout_s=5)
    assert inbox.view(again).tolist() == [9] * 100


def test_an_engine_that_refuses_fails_the_write_and_the_next_may_succeed(ends: Ends) -> None:
    engine, inbox, outbox = ends
    region = inbox.register(100, epoch=0)
    engine.may_finish.set()
    engine.refuses = "the cable is cut"
    with pytest.raises(TransportError, match=r"100 bytes at offset 0 of .* failed: the cable is cut"):
        outbox.wait([outbox.write(region, 0, np.zeros(100, np.uint8))], timeout_s=5)
    engine.refuses = ""
    outbox.wait([outbox.write(region, 0, np.ones(100, np.uint8))], timeout_s=5)
    assert inbox.view(region).all()
    outbox.cancel(region)
    inbox.seal(region, timeout_s=5)


def test_no_region_lies_where_another_one_did_that_a_sender_may_remember(ends: Ends) -> None:
    _, inbox, _ = ends
    seen: list[tuple[int, int]] = []
    for epoch, nbytes in enumerate([100_000, 300_000, 500_000, 700_000]):  # each is too large for the one before
        region = inbox.register(nbytes, epoch=epoch)
        start = pointer(inbox, region)
        assert all(start + nbytes <= first or last <= start for first, last in seen)
        seen.append((start, start + nbytes))
        inbox.view(region)[:] = 1
        inbox.release(region)


def test_memory_that_is_given_back_takes_no_room(ends: Ends) -> None:
    _, inbox, _ = ends
    region = inbox.register(100_000, epoch=0)
    memory = inbox.view(region)
    memory[:] = 1
    inbox.release(region)
    inbox.register(200_000, epoch=1)
    assert not memory.any()
