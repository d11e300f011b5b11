"""Who may call the leader of a push, and what becomes of those who may not or do not speak."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

import pytest
from miles_weightsync import SyncError
from miles_weightsync.staged.rendezvous import Rendezvous
from miles_weightsync.wire import Channel, ConnectionLost


@pytest.fixture
def rendezvous() -> Iterator[Rendezvous]:
    made = Rendezvous(host="127.0.0.1")
    yield made
    made.close()


def call(rendezvous: Rendezvous, token: str, rank: object) -> Channel:
    channel = Channel.connect("127.0.0.1", rendezvous.port, timeout_s=5)
    channel.send({"op": "hello", "token": token, "rank": rank})
    return channel


def test_those_with_the_token_are_let_in_by_rank_beside_silent_and_foreign_callers(rendezvous: Rendezvous) -> None:
    token = rendezvous.expect()
    silent = Channel.connect("127.0.0.1", rendezvous.port, timeout_s=5)
    foreign, nameless = call(rendezvous, "guess", 0), call(rendezvous, token, "zero")
    callers = [call(rendezvous, token, rank) for rank in (1, 0)]
    found = rendezvous.collect(token, 2, timeout_s=5, what="Ranks")
    assert sorted(found) == [0, 1]
    found[1][0].send({"op": "welcome"})
    assert callers[0].receive(5) == {"op": "welcome"}
    for refused in (foreign, nameless):
        with pytest.raises(ConnectionLost):
            refused.receive(5)
    for channel in (silent, foreign, nameless, *callers, *(channel for channel, _ in found.values())):
        channel.close()


def test_who_does_not_call_is_named_and_a_token_works_once(rendezvous: Rendezvous) -> None:
    token = rendezvous.expect()
    early = call(rendezvous, token, 1)
    with pytest.raises(SyncError, match=r"Ranks \[0, 2\] did not call back within 1 s"):
        rendezvous.collect(token, 3, timeout_s=1, what="Ranks")
    late = call(rendezvous, token, 0)
    for channel in (early, late):
        with pytest.raises(ConnectionLost):
            channel.receive(5)
        channel.close()


def test_what_is_no_message_ends_the_connection_and_silence_ends_at_the_deadline() -> None:
    for sent, error in ((struct.pack("!I", 1 << 31), ConnectionLost), (struct.pack("!I", 2) + b"[]", ConnectionLost)):
        ours, theirs = socket.socketpair()
        with theirs:
            channel = Channel(ours)
            theirs.sendall(sent)
            with pytest.raises(error):
                channel.receive(5)
            channel.close()
    ours, theirs = socket.socketpair()
    with theirs:
        channel = Channel(ours)
        assert not channel.is_closed
        with pytest.raises(TimeoutError):
            channel.receive(0.05)
        channel.close()


def test_a_connection_whose_other_end_is_gone_is_seen_without_reading() -> None:
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    theirs.close()
    assert channel.is_closed
    channel.close()
    assert channel.is_closed
