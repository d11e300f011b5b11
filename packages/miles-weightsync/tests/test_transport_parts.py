"""What single transports promise beyond the common interface, and the bookkeeping that they share."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from miles_weightsync import shm_free_bytes
from miles_weightsync.errors import RegionError, TransportError, TransportTimeout
from miles_weightsync.shm import SHM_DIR, Segment
from miles_weightsync.transports import Region, make_inbox, make_outbox
from miles_weightsync.transports.broadcast import BroadcastOutbox
from miles_weightsync.transports.outgoing import OutboxBase, Write
from miles_weightsync.transports.shm import ShmInbox, ShmOutbox
from miles_weightsync.transports.tcp import TcpInbox, TcpOutbox
from transport_peer import Peer, pattern


class Stuck(OutboxBase):
    """An outbox whose bytes never travel."""

    transport = "shm"

    def _begin(self, write: Write) -> None: ...
    def _stop(self, region: Region) -> None: ...
    def _shut(self) -> None: ...


def test_a_write_that_overlaps_an_unfinished_one_is_refused_until_that_ends() -> None:
    outbox, region = Stuck(), Region(transport="shm", nbytes=100, epoch=0, address={})
    other = replace(region, epoch=1)
    outbox.write(region, 10, np.zeros(10, np.uint8))
    for offset, nbytes in ((0, 11), (19, 1), (12, 3), (0, 100)):
        with pytest.raises(RegionError, match=rf"{nbytes} bytes at offset {offset} .*overlaps.* 10 bytes at offset 10"):
            outbox.write(region, offset, np.zeros(nbytes, np.uint8))
    outbox.write(region, 0, np.zeros(10, np.uint8))
    outbox.write(region, 20, np.zeros(80, np.uint8))
    outbox.write(other, 10, np.zeros(10, np.uint8))
    outbox.cancel(region)
    outbox.write(region, 0, np.zeros(100, np.uint8))


def test_a_wait_names_how_many_writes_are_late_and_a_failure_ends_it_before_its_deadline() -> None:
    outbox, region = Stuck(), Region(transport="shm", nbytes=100, epoch=4, address={})
    tickets = [outbox.write(region, i, np.zeros(1, np.uint8)) for i in range(3)]
    with pytest.raises(TransportTimeout, match=r"3 of 3 writes are late after 0.01 s, first 1 bytes at offset 0 of"):
        outbox.wait(tickets, timeout_s=0.01)
    canceller = threading.Timer(0.05, outbox.cancel, [region])
    canceller.start()
    with pytest.raises(TransportError, match="was cancelled"):
        outbox.wait(tickets, timeout_s=60)
    canceller.join()


@pytest.fixture
def tcp() -> Iterator[tuple[TcpInbox, TcpOutbox]]:
    inbox, outbox = TcpInbox(), TcpOutbox()
    yield inbox, outbox
    outbox.close()
    inbox.close()


def test_more_shared_memory_than_there_is_is_told_in_numbers() -> None:
    inbox = ShmInbox()
    wanted = shm_free_bytes() + (1 << 30)
    with pytest.raises(TransportError, match=rf"needs {wanted + 64} bytes of {SHM_DIR} but \d+ are free"):
        inbox.register(wanted, epoch=0)
    inbox.release(inbox.register(10, epoch=0))
    inbox.close()


def test_shared_memory_is_used_again_only_when_nobody_writes_to_it() -> None:
    inbox, outbox = ShmInbox(), ShmOutbox()
    first = inbox.register(1000, epoch=0)
    inbox.release(first)
    second = inbox.register(500, epoch=1)
    assert second.address["segment"] == first.address["segment"]
    assert outbox.lease(second, 0, 1) is not None
    inbox.release(second)
    third = inbox.register(500, epoch=2)
    assert third.address["segment"] != first.address["segment"]
    outbox.close()
    inbox.close()


def test_a_writer_that_has_left_no_longer_counts_and_one_of_two_does() -> None:
    owner = Segment.create(10)
    writer, other = Segment.attach(owner.name, 10), Segment.attach(owner.name, 10)
    assert not owner.has_writers
    writer.enter()
    writer.enter()
    other.enter()
    writer.leave()
    assert owner.has_writers
    writer.leave()
    assert owner.has_writers
    other.close()  # as the kernel does for a process that dies
    assert not owner.has_writers
    assert not writer.owner_is_dead
    writer.close()
    owner.close()


def test_a_wrong_token_or_epoch_is_refused_and_says_so(tcp: tuple[TcpInbox, TcpOutbox]) -> None:
    inbox, outbox = tcp
    region = inbox.register(3, epoch=1)
    for wrong, told in (
        (replace(region, address={**region.address, "token": "0" * 32}), "the token is wrong"),
        (replace(region, epoch=2), r"no region of this inbox.*epoch 2"),
        (replace(region, address={**region.address, "id": 5}), "no region of this inbox"),
        (replace(region, address={**region.address, "port": 1}), "no connection to its receiver at 127.0.0.1, port 1"),
    ):
        with pytest.raises(TransportError, match=told):
            outbox.wait([outbox.write(wrong, 0, np.zeros(3, np.uint8))], timeout_s=5)
    outbox.wait([outbox.write(region, 0, np.ones(3, np.uint8))], timeout_s=5)


def test_a_frame_outside_the_region_is_refused_whatever_the_sender_believes(tcp: tuple[TcpInbox, TcpOutbox]) -> None:
    inbox, outbox = tcp
    region = inbox.register(100, epoch=1)
    with pytest.raises(TransportError, match=r"a frame of epoch 1 for 50 bytes at 90 does not lie in .* 100 bytes"):
        outbox.wait([outbox.write(replace(region, nbytes=1000), 90, np.zeros(50, np.uint8))], timeout_s=5)


def test_strangers_who_say_nothing_or_nonsense_do_not_stand_in_the_way(tcp: tuple[TcpInbox, TcpOutbox]) -> None:
    inbox, outbox = tcp
    region = inbox.register(3, epoch=1)
    where = ("127.0.0.1", region.number("port"))
    with socket.create_connection(where), socket.create_connection(where) as rude:
        rude.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
        outbox.wait([outbox.write(region, 0, np.ones(3, np.uint8))], timeout_s=5)
        assert inbox.view(region).tolist() == [1, 1, 1]
        inbox.close()  # does not wait for them


def test_a_read_that_waits_for_the_rest_of_a_frame_ends_with_its_region(tcp: tuple[TcpInbox, TcpOutbox]) -> None:
    from miles_weightsync.transports.links import dial

    inbox, _ = tcp
    region = inbox.register(1000, epoch=1)
    with dial(region, buffer_bytes=1 << 16, id=region.number("id"), opened=lambda _: None) as sender:
        sender.sendall(struct.pack("!QQQ", 1, 0, 1000) + b"x" * 10)
        inbox.fence(2)
        inbox.seal(region, timeout_s=5)
        with pytest.raises(OSError, match=r"reset|Broken pipe"):  # noqa: PT012
            for _ in range(1000):
                sender.sendall(b"y" * 100)


def test_a_port_that_is_taken_is_named(tcp: tuple[TcpInbox, TcpOutbox]) -> None:
    port = tcp[0].register(1, epoch=0).number("port")
    with pytest.raises(TransportError, match=rf"Cannot listen on 127.0.0.1, port {port}: Address already in use"):
        TcpInbox(port=port)


def test_a_broadcast_reaches_every_receiver_and_goes_on_without_one_that_died() -> None:
    receivers = [Peer("broadcast") for _ in range(2)]
    outbox = make_outbox("broadcast")
    assert isinstance(outbox, BroadcastOutbox)
    try:
        for receiver in receivers:
            receiver.tell("register", nbytes=40 << 20, epoch=3)
        texts = [receiver.answer() for receiver in receivers]
        regions, data = [Region.from_json(text) for text in texts], pattern(1, (33 << 20) + 1)
        tickets = outbox.write_all(regions, 5, data)
        outbox.wait(tickets, timeout_s=30)
        assert [ticket.region for ticket in tickets] == regions
        for receiver, text in zip(receivers, texts, strict=True):
            assert receiver("equals", region=text, offset=5, nbytes=data.nbytes, seed=1)
        receivers[0].kill()
        tickets = outbox.write_all(regions, 0, data)
        for ticket in tickets:
            with pytest.raises(TransportError, match=r"34603009 bytes at offset 0 of .* failed"):
                outbox.wait([ticket], timeout_s=10)
        outbox.wait(outbox.write_all(regions[1:], 0, data), timeout_s=30)
        assert receivers[1]("equals", region=texts[1], offset=0, nbytes=data.nbytes, seed=1)
        with pytest.raises(TransportError, match=r"one epoch, not to \[3, 4\]"):
            outbox.write_all([regions[1], replace(regions[1], epoch=4)], 0, data)
    finally:
        outbox.close()
        for receiver in receivers:
            receiver.end()


def test_bytes_that_may_only_be_read_are_broadcast_too() -> None:
    inbox, outbox = make_inbox("broadcast"), make_outbox("broadcast")
    region = inbox.register(4, epoch=0)
    outbox.wait([outbox.write(region, 0, np.frombuffer(b"abcd", np.uint8))], timeout_s=20)
    assert inbox.view(region).tobytes() == b"abcd"
    outbox.close()
    inbox.close()
