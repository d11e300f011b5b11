"""An engine that is whole and known does not stay paused, whichever push fails; one that is not stays paused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from miles_weightsync import ShardError, StagingError, SyncError, WeightSyncError
from miles_weightsync.push import Pusher
from miles_weightsync.receiver.staging import Staged, StagingFault
from miles_weightsync.shm import Segment
from miles_weightsync.staged.lane import StagedLane
from miles_weightsync.staged.link import Link
from miles_weightsync.staged.sender import Sender
from staged_bed import EMBEDDING, BedEngine, checkpoint, shards
from test_staged_faults import CONFIG, push, serves

Bed = Callable[..., BedEngine]
Patch = pytest.MonkeyPatch


@contextmanager
def unreachable(engine: BedEngine, *paths: str) -> Iterator[None]:
    """The engine refuses some requests all the time."""
    with pytest.MonkeyPatch.context() as patch:
        for path in paths:
            patch.setattr(engine, f"do_{path}", lambda body: (500, {"success": False, "message": "out of order"}))
        yield


def leave_paused(pusher: Pusher, engine: BedEngine, how: str) -> None:
    """Push version 2 so that the engine stays paused: with version 2 whole, or 1, or one of them a step away."""
    with pytest.MonkeyPatch.context() as patch:
        if how == "died in the commit":  # as a dead sender: nothing is put back, and the links end
            patch.setattr(StagedLane, "_put_back", lambda lane: None)
            patch.setattr(StagedLane, "_serve", fail)
            real = Link.ask

            def ask(link: Link, messages: Any, deadline: Any) -> Any:
                if isinstance(messages, dict) and messages["op"] == "finalize":
                    fail()
                return real(link, messages, deadline)

            patch.setattr(Link, "ask", ask)
            patch.setattr(Link, "let_go", lambda link, deadline: None)
            refused: tuple[str, ...] = ()
        elif how == "could not be put back":
            patch.setattr(Staged, "_apply", lambda staged, index, bucket: fail())
            refused = ("end_weight_update",)
        else:
            refused = ("end_weight_update",) if how == "session could not be closed" else ("continue_generation",)
        with unreachable(engine, *refused), pytest.raises(SyncError):
            push(pusher, 2)
        if how == "died in the commit":
            pusher.close()
    assert engine.generate() is None


def fail(*_: Any) -> Any:
    raise SyncError("scripted failure", phase="load")


def push_without_room(pusher: Pusher, patch: Patch) -> None:
    def full(nbytes: int) -> Any:
        raise StagingError(f"/dev/shm has no {nbytes} bytes left")

    patch.setattr(Segment, "create", full)
    patch.setattr(Segment, "link", lambda segment: full(segment.nbytes))
    with pytest.raises(SyncError, match="bytes left"):
        push(pusher, 3)


def push_changed_bytes(pusher: Pusher, patch: Patch) -> None:
    for name in ("_pack", "_content"):  # of whole values, and of differences
        patch.setattr(Sender, name, lambda *_: "0")
    with pytest.raises(SyncError, match=r"checksums of what arrived differ|not what was sent"):
        push(pusher, 3)


def push_too_little(pusher: Pusher, patch: Patch) -> None:
    with pytest.raises(ShardError, match=EMBEDDING):
        pusher.push([shard for shard in shards(checkpoint(1)) if shard.name != EMBEDDING], version=3)


HOW_PAUSED = {
    "died in the commit": 1,
    "could not be put back": 1,
    "session could not be closed": 2,
    "could not continue": 2,
}
"""To the version that is whole."""


@pytest.mark.parametrize(
    ("how", "same_sender", "again"),
    [
        *((how, False, push_changed_bytes) for how in HOW_PAUSED),
        *((how, True, push_changed_bytes) for how in HOW_PAUSED if how != "died in the commit"),
        ("died in the commit", False, push_without_room),
        ("could not be put back", True, push_without_room),
        ("could not continue", True, push_too_little),
    ],
)
def test_an_engine_that_was_left_paused_serves_again_though_the_next_push_fails_before_its_commit(
    bed: Bed, how: str, same_sender: bool, again: Callable[[Pusher, Patch], None]
) -> None:
    engine = bed(tp=2)
    first = Pusher([engine.url], config=CONFIG)
    push(first, 1)
    leave_paused(first, engine, how)
    if not same_sender:
        with unreachable(engine, "continue_generation"):
            first.close()
    with Pusher([engine.url], config=CONFIG) as second:
        pusher = first if same_sender else second
        with pytest.MonkeyPatch.context() as patch:
            again(pusher, patch)
        assert serves(engine) == HOW_PAUSED[how]
        push(pusher, 3)
        assert serves(engine) == 3
    first.close()


@pytest.mark.parametrize("how", ["could not be put back", "could not continue"])
def test_a_pusher_that_goes_lets_an_engine_serve_that_it_left_paused(bed: Bed, how: str) -> None:
    engine = bed(tp=2)
    with Pusher([engine.url], config=CONFIG) as pusher:
        push(pusher, 1)
        leave_paused(pusher, engine, how)
    assert serves(engine) == HOW_PAUSED[how]


def test_an_engine_that_could_not_serve_while_the_next_push_began_serves_when_that_has_failed(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = bed()
    with Pusher([engine.url], config=CONFIG) as pusher:
        push(pusher, 1)
        leave_paused(pusher, engine, "could not continue")
        engine.fails["/continue_generation"] = 2
        monkeypatch.setattr(engine, "do_continue_generation", only_after(2, engine.do_continue_generation))
        with monkeypatch.context() as patch:
            push_changed_bytes(pusher, patch)
        assert serves(engine) == 2


def only_after(count: int, real: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Carry out no request before the `count`-th is over."""
    left = [count]

    def carry_out(body: Any) -> Any:
        left[0] -= 1
        return (500, {"message": "not yet"}) if left[0] >= 0 else real(body)

    return carry_out


def test_an_engine_that_is_broken_stays_paused_whatever_is_tried(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = bed(tp=2)

    def broken(staged: Staged) -> None:
        staged.state = "broken"
        raise StagingFault("the old weights could not be put back")

    with Pusher([engine.url], config=CONFIG) as pusher:
        push(pusher, 1)
        with monkeypatch.context() as patch:
            patch.setattr(Staged, "put_back", broken)
            patch.setattr(Staged, "_apply", lambda staged, index, bucket: fail())
            with pytest.raises(SyncError, match="could not be put back"):
                push(pusher, 2)
        assert engine.generate() is None
        with monkeypatch.context() as patch:
            push_changed_bytes(pusher, patch)
        assert engine.generate() is None
        pusher.verify(shards(checkpoint(1)))
        assert engine.generate() is None
    with Pusher([engine.url], config=CONFIG) as second:
        second.verify(shards(checkpoint(1)))
        assert engine.generate() is None
        push(second, 3)
        assert serves(engine) == 3


def test_a_stranger_that_was_found_paused_waits_for_a_first_version(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = bed(tp=2)
    engine.is_paused = True  # as by a push of another way that broke off
    for _ in range(2):
        with Pusher([engine.url], config=CONFIG) as pusher:
            with monkeypatch.context() as patch:
                push_changed_bytes(pusher, patch)
            assert engine.generate() is None
            pusher.verify(shards(checkpoint(1)))
            assert engine.generate() is None
    with Pusher([engine.url], config=CONFIG) as pusher:
        push(pusher, 1)
        assert serves(engine) == 1


def test_an_engine_with_weights_of_its_own_serves_them_after_a_sender_died_in_its_first_commit(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = bed(tp=2)
    pusher = Pusher([engine.url], config=CONFIG)
    leave_paused(pusher, engine, "died in the commit")
    with Pusher([engine.url], config=CONFIG) as second:
        with monkeypatch.context() as patch:
            push_changed_bytes(second, patch)
        assert serves(engine) == 0


CALLS = ["pause_generation", "begin_weight_update", "update_weights_from_tensor", "end_weight_update",
         "update_weight_version", "continue_generation"]  # fmt: skip


@pytest.mark.parametrize("path", CALLS)
def test_no_request_that_fails_while_a_sender_attaches_or_checks_leaves_the_engine_paused(bed: Bed, path: str) -> None:
    engine = bed(tp=2)
    for _ in ("a sender that is attached", "a new one"):
        with Pusher([engine.url], config=CONFIG) as pusher:
            if engine.version == "0":
                push(pusher, 1)
            engine.fails[f"/{path}"] = 1
            with suppress(WeightSyncError):  # what was carried out may be enough
                pusher.verify(shards(checkpoint(1)))
            assert (serves(engine), engine.fails[f"/{path}"]) == (1, 0)


def test_a_mistake_in_a_push_leaves_no_engine_paused(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = bed()
    with Pusher([engine.url], config=CONFIG) as pusher:
        push(pusher, 1)
        with monkeypatch.context() as patch:

            def mistake(lane: StagedLane) -> None:
                raise KeyError("a mistake")

            patch.setattr(StagedLane, "_commit", mistake)
            with pytest.raises(SyncError, match="a mistake"):
                push(pusher, 2)
        assert serves(engine) == 1
