"""What every transport promises, shown on each that can run here: real processes, real sockets, real memory."""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from installed import skip_unless_installed
from miles_weightsync.errors import RegionError, TransportError, TransportTimeout
from miles_weightsync.transports import TRANSPORTS, Inbox, Outbox, Region, make_inbox, make_outbox
from transport_peer import Peer, PeerError, pattern

MIB = 1 << 20
HERE = [name for name in TRANSPORTS if name not in ("nccl", "cupy_nccl", "cuda_ipc")]
"""Transports that need no GPU."""

ONE_SIDED = {"mooncake", "nixl"}
"""Transports whose writes nobody can stop once begun."""

Ends = tuple[Inbox, Outbox]


@pytest.fixture(params=HERE)
def transport(request: pytest.FixtureRequest) -> str:
    skip_unless_installed(request.param)
    return request.param


@pytest.fixture
def ends(transport: str) -> Iterator[Ends]:
    inbox, outbox = make_inbox(transport), make_outbox(transport)
    yield inbox, outbox
    outbox.close()
    inbox.close()


@pytest.fixture(scope="module")
def idle_peers() -> Iterator[dict[str, list[Peer]]]:
    """Processes that go from test to test: some transports take seconds to import."""
    idle: dict[str, list[Peer]] = {}
    yield idle
    for peer in [peer for peers in idle.values() for peer in peers]:
        peer.end()


@pytest.fixture
def start_peer(transport: str, idle_peers: dict[str, list[Peer]]) -> Iterator[Callable[[], Peer]]:
    idle, used = idle_peers.setdefault(transport, []), list[Peer]()

    def start() -> Peer:
        used.append(idle.pop() if idle else Peer(transport))
        return used[-1]

    yield start
    for peer in used:
        if peer.is_idle:
            peer("reset")
            idle.append(peer)
        else:
            peer.end()


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cuts=st.lists(st.integers(0, 200_000), min_size=2, max_size=12, unique=True), seed=st.integers(0, 2**16))
def test_bytes_arrive_where_they_were_sent_and_nowhere_else(ends: Ends, cuts: list[int], seed: int) -> None:
    inbox, outbox = ends
    region = inbox.register(200_000, epoch=0)
    expected = np.full(200_000, 0xA5, np.uint8)
    inbox.view(region)[:] = expected
    cuts = sorted(cuts)
    parts = [part for i, part in enumerate(pairwise(cuts)) if (seed >> i) % 3]
    for start, stop in parts:
        expected[start:stop] = pattern(start, stop - start)
    tickets = [outbox.write(region, start, pattern(start, stop - start)) for start, stop in parts]
    outbox.wait(tickets, timeout_s=20)
    np.testing.assert_array_equal(inbox.view(region), expected)
    assert all(ticket.is_finished and ticket.error is None for ticket in tickets)
    outbox.cancel(region)
    inbox.release(region)


def test_a_large_write_of_odd_size_is_whole(ends: Ends) -> None:
    inbox, outbox = ends
    data = pattern(1, 37 * MIB + 13)
    region = inbox.register(data.nbytes + 7, epoch=1)
    outbox.wait([outbox.write(region, 7, data)], timeout_s=20)
    assert np.array_equal(inbox.view(region)[7:], data)


def test_nothing_to_write_is_written_at_once(ends: Ends) -> None:
    inbox, outbox = ends
    for nbytes in (0, 10):
        region = inbox.register(nbytes, epoch=0)
        ticket = outbox.write(region, nbytes, np.empty(0, np.uint8))
        assert ticket.is_finished
        outbox.wait([ticket], timeout_s=0)
        assert inbox.view(region).nbytes == nbytes


def test_what_cannot_be_written_is_refused_with_the_numbers(ends: Ends) -> None:
    inbox, outbox = ends
    region = inbox.register(100, epoch=3)
    with pytest.raises(RegionError, match=r"10 bytes at offset 91 do not lie within .* 100 bytes, epoch 3"):
        outbox.write(region, 91, np.zeros(10, np.uint8))
    with pytest.raises(RegionError, match="1 bytes at offset -1"):
        outbox.write(region, -1, np.zeros(1, np.uint8))
    with pytest.raises(RegionError, match=r"101 bytes at offset 0"):
        outbox.lease(region, 0, 101)
    for data in (np.zeros(4, np.int16), np.zeros((2, 2), np.uint8), np.zeros(8, np.uint8)[::2]):
        with pytest.raises(RegionError, match=r"must be \[n\] contiguous uint8; got .*ascontiguousarray"):
            outbox.write(region, 0, data)
    other = Region(transport="tcp" if region.transport == "shm" else "shm", nbytes=100, epoch=3, address={})
    with pytest.raises(RegionError, match="cannot write to"):
        outbox.write(other, 0, np.zeros(1, np.uint8))


def test_a_lease_is_the_receivers_memory_or_nothing(ends: Ends) -> None:
    inbox, outbox = ends
    region = inbox.register(100, epoch=0)
    leased = outbox.lease(region, 10, 5)
    assert (leased is not None) == (region.transport == "shm")
    if leased is not None:
        leased[:] = 7
        assert inbox.view(region)[10:15].tolist() == [7] * 5
        with pytest.raises(TransportTimeout, match="still writes"):
            inbox.seal(region, timeout_s=0.05)
        outbox.cancel(region)
    inbox.seal(region, timeout_s=5)


def test_an_idle_transport_takes_no_cpu(ends: Ends) -> None:
    inbox, outbox = ends
    region = inbox.register(100, epoch=0)
    outbox.wait([outbox.write(region, 0, np.ones(100, np.uint8))], timeout_s=20)
    outbox.cancel(region)
    inbox.seal(region, timeout_s=20)
    before = time.process_time()
    threading.Event().wait(0.3)
    assert time.process_time() - before < 0.05, "a thread spins, in an engine on a core that it computes with"


def test_writers_in_several_processes_fill_one_region(ends: Ends, start_peer: Callable[[], Peer]) -> None:
    inbox, _ = ends
    part = 3 * MIB + 1
    region = inbox.register(12 * part, epoch=5)
    writers = [start_peer() for _ in range(3)]
    for number, writer in enumerate(writers):
        for i in range(number, 12, 3):
            writer.tell("write", region=region.to_json(), offset=i * part, nbytes=part, seed=i)
        writer.tell("wait", timeout_s=20)
    for writer in writers:
        for _ in range(5):
            writer.answer()
    view = inbox.view(region)
    for i in range(12):
        assert np.array_equal(view[i * part : (i + 1) * part], pattern(i, part)), i


@pytest.mark.parametrize("seed", range(4))
def test_an_old_epoch_never_lands_after_its_fence(ends: Ends, start_peer: Callable[[], Peer], seed: int) -> None:
    inbox, outbox = ends
    schedule = random.Random(seed)
    region, nbytes = inbox.register(6 * MIB, epoch=0), 6 * MIB
    old = [start_peer() for _ in range(2)]
    for epoch in range(1, 4):
        for writer in old:
            writer.flood(region.to_json(), seed=0)
        time.sleep(schedule.choice([0.0, 0.001, 0.01, 0.05]))
        inbox.fence(epoch)
        if schedule.random() < 0.7:
            inbox.release(region)
        new = inbox.register(nbytes, epoch=epoch)
        data = pattern(epoch, nbytes)
        if schedule.random() < 0.5:
            inbox.view(new)[:] = data
        else:
            outbox.wait([outbox.write(new, 0, data)], timeout_s=20)
        outbox.cancel(new)
        for writer in old:
            writer.answer()  # its flood has ended by a refusal
            with pytest.raises(PeerError, match=r"bytes at offset 0 of .*epoch"):  # noqa: PT012
                writer("write", region=region.to_json(), offset=0, nbytes=nbytes, seed=0)
                writer("wait", timeout_s=20)
        assert np.array_equal(inbox.view(new), data)
        inbox.release(region)
        region = new


def test_a_sealed_region_does_not_change_while_its_sender_goes_on(ends: Ends, start_peer: Callable[[], Peer]) -> None:
    inbox, _ = ends
    region = inbox.register(8 * MIB, epoch=1)
    writer = start_peer()
    writer.flood(region.to_json(), seed=1)
    inbox.seal(region, timeout_s=10)
    inbox.view(region)[:] = 0
    writer.answer()
    assert not inbox.view(region).any()


def test_a_receiver_killed_during_writes_is_an_error_within_the_deadline(
    ends: Ends, start_peer: Callable[[], Peer]
) -> None:
    _, outbox = ends
    receiver = start_peer()
    region = Region.from_json(receiver("register", nbytes=32 * MIB, epoch=1))
    data = pattern(1, 32 * MIB)
    outbox.wait([outbox.write(region, 0, data)], timeout_s=20)
    ticket = outbox.write(region, 0, data)
    receiver.kill()
    started = time.monotonic()
    with pytest.raises(TransportError, match=r"33554432 bytes at offset 0 of .* epoch 1"):  # noqa: PT012
        outbox.wait([ticket], timeout_s=5)  # may have been in place before the kill
        outbox.wait([outbox.write(region, 0, data)], timeout_s=5)
    assert time.monotonic() - started < 11
    outbox.cancel(region)


def test_a_receiver_that_stands_still_ends_a_wait_at_its_deadline(ends: Ends, start_peer: Callable[[], Peer]) -> None:
    _, outbox = ends
    receiver = start_peer()
    region = Region.from_json(receiver("register", nbytes=64 * MIB, epoch=1))
    receiver.process.send_signal(signal.SIGSTOP)
    started = time.monotonic()
    try:
        outbox.wait([outbox.write(region, 0, pattern(1, 64 * MIB))], timeout_s=0.5)
    except TransportTimeout as error:
        assert "1 of 1 writes are late after 0.5 s" in str(error)  # noqa: PT017
    else:
        assert region.transport in {"shm", "nixl"}  # they need nothing of the receiver
    outbox.cancel(region)
    outbox.close()
    assert time.monotonic() - started < 5
    receiver.kill()


def test_a_sender_killed_during_writes_leaves_an_inbox_that_works(ends: Ends, start_peer: Callable[[], Peer]) -> None:
    inbox, outbox = ends
    region = inbox.register(8 * MIB, epoch=1)
    writer = start_peer()
    writer.flood(region.to_json(), seed=1)
    writer.kill()
    data = pattern(2, 8 * MIB)
    outbox.wait([outbox.write(region, 0, data)], timeout_s=20)
    outbox.cancel(region)
    if region.transport in ONE_SIDED:
        with pytest.raises(TransportTimeout, match=r"may still change .* a sender died"):
            inbox.seal(region, timeout_s=5)
    else:
        inbox.seal(region, timeout_s=5)
    assert np.array_equal(inbox.view(region), data)
    inbox.fence(2)
    again = inbox.register(8 * MIB, epoch=2)
    outbox.wait([outbox.write(again, 0, data)], timeout_s=20)
    assert np.array_equal(inbox.view(again), data)


def test_a_region_that_is_over_takes_no_write_and_says_so(ends: Ends) -> None:
    inbox, outbox = ends
    data = np.ones(10, np.uint8)
    for epoch, end in enumerate([inbox.release, lambda r: inbox.seal(r, timeout_s=5), lambda r: inbox.fence(9)]):
        region = inbox.register(10, epoch=epoch)
        end(region)
        with pytest.raises(TransportError, match=r"10 bytes at offset 0 of .* failed: .*(no longer|any more)"):
            outbox.wait([outbox.write(region, 0, data)], timeout_s=5)
    with pytest.raises(RegionError, match="Epoch 8 is over: this inbox takes 9 or later"):
        inbox.register(10, epoch=8)
    inbox.release(region)
    inbox.release(region)
    with pytest.raises(RegionError, match="does not hold"):
        inbox.view(region)


def test_a_cancelled_write_is_an_error_and_the_region_can_be_written_again(ends: Ends) -> None:
    inbox, outbox = ends
    region = inbox.register(32 * MIB, epoch=1)
    data = pattern(3, 32 * MIB)
    tickets = [outbox.write(region, i * MIB, data[i * MIB : (i + 1) * MIB]) for i in range(32)]
    outbox.cancel(region)
    assert all(ticket.is_finished for ticket in tickets)
    for ticket in tickets:
        if ticket.error is not None:
            assert "was cancelled" in str(ticket.error)
    outbox.wait([outbox.write(region, 0, data)], timeout_s=20)
    assert np.array_equal(inbox.view(region), data)


def test_closing_twice_is_no_error_and_closed_ends_say_so(ends: Ends) -> None:
    inbox, outbox = ends
    region = inbox.register(10, epoch=0)
    for end in (outbox, inbox):
        end.close()
        end.close()
    with pytest.raises(TransportError, match="outbox is closed"):
        outbox.write(region, 0, np.zeros(1, np.uint8))
    with pytest.raises(TransportError, match="inbox is closed"):
        inbox.register(10, epoch=0)


def test_nothing_is_left_open(transport: str) -> None:
    def use() -> None:
        inbox, outbox = make_inbox(transport), make_outbox(transport)
        for epoch in range(3):
            region = inbox.register(MIB, epoch=epoch)
            outbox.wait([outbox.write(region, 0, pattern(epoch, MIB))], timeout_s=20)
            outbox.write(region, 0, pattern(epoch, MIB))
        outbox.close()
        inbox.close()

    def held() -> tuple[int, int, int]:
        gc.collect()
        mapped = Path("/proc/self/maps").read_text().count("/dev/shm/")
        return len(os.listdir("/proc/self/fd")), threading.active_count(), mapped

    use()
    before = held()
    use()
    assert held() == before


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("{", "must be JSON"),
        ("[]", "must be a JSON object"),
        ({"transport": "pigeon"}, r"`transport` must be one of shm, .*got 'pigeon'"),
        ({"nbytes": -1}, "`nbytes` must be an integer of at least 0; got -1"),
        ({"epoch": True}, "`epoch` must be an integer"),
        ({"address": []}, "`address` must be an object"),
        ({"address": {"port": 1.5}}, "`port` in a region's `address` must be a string or an integer; got 1.5"),
    ],
)
def test_a_region_that_is_none_is_refused_with_the_field_named(change: str | dict[str, Any], told: str) -> None:
    whole = json.loads(Region(transport="shm", nbytes=1, epoch=2, address={"name": "x"}).to_json())
    text = change if isinstance(change, str) else json.dumps({**whole, **change})
    with pytest.raises(RegionError, match=told):
        Region.from_json(text)


def test_a_region_survives_json() -> None:
    region = Region(transport="tcp", nbytes=2**40, epoch=2**50, address={"host": "a", "id": 2**62})
    assert Region.from_json(region.to_json()) == region


def test_an_address_without_what_is_needed_is_an_error_of_the_write(transport: str, ends: Ends) -> None:
    _, outbox = ends
    for address in ({}, {"name": "../../etc/passwd", "segment": "../../etc/passwd", "bytes": 3}):
        region = Region(transport=transport, nbytes=3, epoch=0, address=address)
        with pytest.raises(TransportError, match="3 bytes"):
            outbox.wait([outbox.write(region, 0, np.zeros(3, np.uint8))], timeout_s=5)


def test_a_transport_that_does_not_exist_is_named() -> None:
    with pytest.raises(RegionError, match=r"no transport `pigeon`; choose from shm, tcp"):
        make_inbox("pigeon")
