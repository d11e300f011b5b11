"""Whatever dies, breaks or lies in a staged push, no engine answers from a mixed model, and the next push succeeds."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Literal

import httpx
import miles_weightsync.staged.pushes as pushes_module
import pytest
import staged_deaths
import torch
from installed import skip_unless_installed
from miles_weightsync import PushConfig, ShardError, SyncError
from miles_weightsync.push import Pusher
from miles_weightsync.receiver import Receiver
from miles_weightsync.receiver.staging import Staged
from miles_weightsync.staged.sender import Sender, Senders
from miles_weightsync.transports.onesided import OneSidedInbox
from staged_bed import AShard, BedEngine, checkpoint, digests, shards

CONFIG = PushConfig(way="staged", bucket_bytes=65536, timeout_s=20)
FULL = replace(CONFIG, delta="off")
WHOLE = {1: {"steps": 0, "seed": 1}, 2: {"steps": 1, "seed": 1}, 3: {"steps": 2, "seed": 1}, 0: {"steps": 0, "seed": 0}}
"""Versions of these tests: 1 is a checkpoint, 2 and 3 are it after a step each, 0 is what an engine starts with."""

forks = multiprocessing.get_context("forkserver")
forks.set_forkserver_preload(["miles_weightsync.push", "miles_weightsync.receiver", "miles_weightsync.delta"])

Bed = Callable[..., BedEngine]


_known: dict[int, dict[tuple[str, ...], int]] = {}


def version_of(answer: dict[str, Any]) -> int:
    """Which whole version an answer was computed from; fails for a mixed one."""
    tp = len(answer["digests"])
    if tp not in _known:
        _known[tp] = {tuple(digests(w["seed"], tp, steps=w["steps"])): version for version, w in WHOLE.items()}
    found = _known[tp].get(tuple(answer["digests"]))
    assert found is not None, f"an engine answered from a mixed model: {answer}"
    assert answer["fresh"], f"an engine answered from stale derived weights: {answer}"
    assert answer["version"] == str(found), f"an engine stamped {answer['version']} on the weights of {found}"
    return found


def serves(engine: BedEngine) -> int | None:
    answer = engine.generate()
    return None if answer is None else version_of(answer)


def push(pusher: Pusher, version: int) -> Any:
    return pusher.push(shards(checkpoint(1, steps=WHOLE[version]["steps"])), version=version)


def outcomes_of(pusher: Pusher, version: int) -> list[bool]:
    """Which engines a push has reached."""
    try:
        report = push(pusher, version)
    except SyncError as error:
        return [outcome.ok for outcome in error.engines]
    return [outcome.ok for outcome in report.engines]


@contextmanager
def watched(urls: list[str]) -> Iterator[None]:
    """Ask engines for answers all the time; every one must come from a whole version."""
    stop, wrong = threading.Event(), []

    def ask(url: str) -> None:
        with httpx.Client(trust_env=False) as client:
            while not stop.wait(0.01):
                try:
                    answer = client.post(f"{url}/generate", json={}, timeout=5)
                    if answer.status_code == 200:
                        version_of(answer.json())
                except httpx.HTTPError:
                    return
                except AssertionError as error:
                    wrong.append(str(error))
                    return

    threads = [threading.Thread(target=ask, args=(url,)) for url in urls]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not wrong, wrong[0]


@contextmanager
def engine_process(tp: int) -> Iterator[tuple[str, Any, Any]]:
    ours, theirs = forks.Pipe()
    process = forks.Process(target=staged_deaths.engine, args=(theirs, tp), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours.recv(), ours, process
    finally:
        ours.close()
        process.kill()
        process.join()


def kill_an_engine_at(step: int | None, config: PushConfig, bed: Bed) -> int:
    """Push 1 to two engines, 2 with the death of one, 3 to the other and to a fresh one. Returns the steps counted."""
    healthy = bed(tp=1)
    with engine_process(2) as (url, pipe, process), Pusher([url, healthy.url], config=config) as pusher:
        push(pusher, 1)
        pipe.send(step)
        pipe.recv()
        with watched([url, healthy.url]):
            if step is None:
                push(pusher, 2)
                pipe.send(None)
                return int(pipe.recv())
            outcomes = outcomes_of(pusher, 2)
        assert outcomes[1]
        if outcomes[0]:  # it died after its part was done
            process.join(0.2)
        assert serves(healthy) == 2
        fresh = bed(tp=2)
        pusher.set_engines([fresh.url, healthy.url])
        report = push(pusher, 3)
        assert report.engines[0].kind == "full"
        assert (serves(fresh), serves(healthy)) == (3, 3)
    return step


@pytest.mark.parametrize("config", [CONFIG, FULL], ids=["delta", "full"])
def test_an_engine_that_dies_at_some_steps_takes_nobody_with_it(bed: Bed, config: PushConfig) -> None:
    count = kill_an_engine_at(None, config, bed)
    assert count > 30
    for step in range(3, count, count // 5):
        kill_an_engine_at(step, config, bed)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("config", [CONFIG, FULL], ids=["delta", "full"])
def test_an_engine_that_dies_at_any_step_takes_nobody_with_it(bed: Bed, config: PushConfig) -> None:
    for step in range(kill_an_engine_at(None, config, bed)):
        kill_an_engine_at(step, config, bed)


def kill_the_sender_at(step: int | str | None, config: PushConfig, bed: Bed) -> int:
    engines = [bed(tp=2), bed(tp=1)]
    urls = [engine.url for engine in engines]
    ours, theirs = forks.Pipe()
    process = forks.Process(target=staged_deaths.sender, args=(theirs, urls, config, step), daemon=True)
    with watched(urls):
        process.start()
        theirs.close()
        process.join(60)
        try:
            count = ours.recv()[0]
        except EOFError:  # it died
            count = step if isinstance(step, int) else 0
    ours.close()
    assert not process.is_alive()
    for engine in engines:
        assert serves(engine) in (None, 1, 2)
    with watched(urls), Pusher(urls, config=config) as pusher:
        push(pusher, 3)
        assert [serves(engine) for engine in engines] == [3, 3]
    if step == WRITING:  # nobody can take its write back: the memory is no longer used
        inboxes = [inbox for engine in engines for each in engine.receivers for inbox in each._inboxes.values()]
        assert sum(inbox.lost_bytes for inbox in inboxes if isinstance(inbox, OneSidedInbox)) > 0
    return int(count or 0)


WRITING = "after put"


@pytest.mark.parametrize(("transport", "config"), [("mooncake", CONFIG), ("nixl", FULL)], ids=["mooncake", "nixl"])
def test_a_sender_that_dies_with_a_one_sided_write_on_its_way_leaves_whole_engines(
    bed: Bed, transport: Literal["mooncake", "nixl"], config: PushConfig
) -> None:
    skip_unless_installed(transport)
    kill_the_sender_at(WRITING, replace(config, transport=transport), bed)


@pytest.mark.parametrize("config", [CONFIG, FULL], ids=["delta", "full"])
def test_a_sender_that_dies_at_some_steps_leaves_whole_engines(bed: Bed, config: PushConfig) -> None:
    count = kill_the_sender_at(None, config, bed)
    assert count > 30
    for step in range(4, count, count // 5):
        kill_the_sender_at(step, config, bed)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("config", [CONFIG, FULL], ids=["delta", "full"])
def test_a_sender_that_dies_at_any_step_leaves_whole_engines(bed: Bed, config: PushConfig) -> None:
    for step in range(kill_the_sender_at(None, config, bed)):
        kill_the_sender_at(step, config, bed)


PATHS = [
    "pause_generation", "flush_cache", "begin_weight_update", "update_weights_from_tensor", "end_weight_update",
    "update_weight_version", "continue_generation",
]  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
def test_a_request_that_was_carried_out_but_not_heard_costs_one_push(bed: Bed, path: str) -> None:
    engine, healthy = bed(tp=2), bed()
    with Pusher([engine.url, healthy.url], config=CONFIG) as pusher, watched([engine.url, healthy.url]):
        push(pusher, 1)
        engine.fails[f"/{path}"] = 1
        if path == "update_weights_from_tensor":  # the receivers know how it ended
            push(pusher, 2)
        else:
            with pytest.raises(SyncError, match="scripted failure") as failure:
                push(pusher, 2)
            assert [outcome.ok for outcome in failure.value.engines] == [False, True]
            assert serves(engine) == (1 if path in PATHS[:4] else 2)
        assert serves(healthy) == 2
        push(pusher, 3)
        assert (serves(engine), serves(healthy)) == (3, 3)


def test_bytes_changed_on_the_way_are_found_before_the_pause(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = bed(tp=2)
    real = Sender._pack

    def lie(self: Sender, load: Any, data: Any) -> str:
        told = real(self, load, data)
        data[len(data) // 2] ^= 1
        return told

    with Pusher([engine.url], config=CONFIG) as pusher:
        with monkeypatch.context() as patch:
            patch.setattr(Sender, "_pack", lie)
            with pytest.raises(SyncError, match=r"checksums of what arrived differ: bucket 0 of trainer rank 0"):
                push(pusher, 1)
        assert serves(engine) == 0
        assert engine.requests.count("/pause_generation") == 1  # that of the attachment
        push(pusher, 1)
        assert serves(engine) == 1


@pytest.mark.parametrize("config", [CONFIG, FULL], ids=["delta", "full"])
def test_parameters_that_came_out_wrong_are_put_back(
    bed: Bed, monkeypatch: pytest.MonkeyPatch, config: PushConfig
) -> None:
    engine = bed(tp=2)
    with Pusher([engine.url], config=config) as pusher, watched([engine.url]):
        push(pusher, 1)
        seen: list[str] = []
        real = Staged._apply

        def wrong_at_last(self: Staged, index: int, bucket: Any) -> str:
            seen.append(real(self, index, bucket))
            return seen[-1] if len(seen) < 2 else "0"

        with monkeypatch.context() as patch:
            patch.setattr(Staged, "_apply", wrong_at_last)
            with pytest.raises(SyncError, match=r"rank 1: the parameters are not what was sent"):
                push(pusher, 2)
        assert serves(engine) == 1
        push(pusher, 3)
        assert serves(engine) == 3


def test_a_model_whose_hook_fails_goes_on_serving_the_old_version(bed: Bed) -> None:
    engine = bed()
    real = engine.models[0].post_load_weights
    calls: list[None] = []

    def fail_once() -> None:
        calls.append(None)
        if len(calls) == 1:
            raise RuntimeError("no memory for w_kc")
        real()

    with Pusher([engine.url], config=CONFIG) as pusher:
        push(pusher, 1)
        engine.models[0].post_load_weights = fail_once  # type: ignore[method-assign]
        with pytest.raises(SyncError, match="no memory for w_kc"):
            push(pusher, 2)
        assert serves(engine) == 1
        push(pusher, 3)
        assert serves(engine) == 3


def test_a_receiver_without_room_says_so_and_serves_on(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    from miles_weightsync import StagingError
    from miles_weightsync.shm import Segment

    engine = bed()
    with Pusher([engine.url], config=CONFIG) as pusher:
        with monkeypatch.context() as patch:

            def full(nbytes: int) -> Any:
                raise StagingError(f"/dev/shm has no {nbytes} bytes left")

            patch.setattr(Segment, "create", full)
            with pytest.raises(SyncError, match=r"/dev/shm has no \d+ bytes left"):
                push(pusher, 1)
        assert serves(engine) == 0
        push(pusher, 1)
        assert serves(engine) == 1


def test_a_receiver_that_hangs_fails_at_the_deadline_and_the_others_do_not_wait_for_it(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, healthy = bed(tp=2), bed()
    release = threading.Event()
    real = Receiver._verify
    served: list[int | None] = []

    def hang(self: Receiver, message: Any) -> Any:
        if self is slow.receivers[1]:
            assert release.wait(30)
            served.append(serves(healthy))
        return real(self, message)

    with Pusher([slow.url, healthy.url], config=replace(CONFIG, timeout_s=2.5)) as pusher:
        push(pusher, 1)
        with monkeypatch.context() as patch:
            patch.setattr(Receiver, "_verify", hang)
            with pytest.raises(SyncError, match=r"rank 1 did not answer within the push's 2.5 s") as failure:
                push(pusher, 2)
            release.set()
        assert [outcome.ok for outcome in failure.value.engines] == [False, True]
        assert serves(slow) == 1
        push(pusher, 3)
        assert (serves(slow), serves(healthy)) == (3, 3)


def test_a_second_sender_is_refused_while_the_first_is_pushing_and_takes_over_afterwards(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pushes_module, "exclusive", lambda urls: nullcontext())  # as from another host
    engine = bed(tp=2)
    refused: list[str] = []
    real = Senders.collect

    def intrude(self: Senders, *args: Any, **kwargs: Any) -> Any:
        if not refused:
            refused.append("")
            with Pusher([engine.url], config=CONFIG) as second, pytest.raises(SyncError) as error:
                push(second, 2)
            refused[0] = str(error.value)
        return real(self, *args, **kwargs)

    with Pusher([engine.url], config=CONFIG) as first, watched([engine.url]):
        push(first, 1)
        with monkeypatch.context() as patch:
            patch.setattr(Senders, "collect", intrude)
            push(first, 2)
        assert "another sender is in the middle of a push" in refused[0]
        assert serves(engine) == 2
        with Pusher([engine.url], config=CONFIG) as second:
            push(second, 3)
        assert serves(engine) == 3
        report = push(first, 3)
        assert report.engines[0].reason == "the engine serves other weights than those pushed last"
        assert serves(engine) == 3


def test_a_version_that_goes_backwards_is_refused_before_anything_is_touched(bed: Bed) -> None:
    engine = bed()
    with Pusher([engine.url], config=CONFIG) as pusher:
        push(pusher, 2)
        with pytest.raises(SyncError, match="Version 1 is older than 2"):
            push(pusher, 1)
        assert serves(engine) == 2


def test_wrong_shapes_and_element_types_are_named_and_touch_no_engine(bed: Bed) -> None:
    engine = bed()
    name = "model.layers.0.mlp.down_proj.weight"
    with Pusher([engine.url], config=CONFIG) as pusher:
        for wrong in (torch.zeros(32, 47), torch.zeros(32, 48, dtype=torch.int32)):
            shard = AShard(name, tuple(wrong.shape), wrong.dtype, ((0, 32), (0, wrong.shape[1])), wrong)
            rest = [each for each in shards(checkpoint(1)) if each.name != name]
            with pytest.raises(ShardError, match=name.replace(".", r"\.")):
                pusher.push([*rest, shard], version=1)
            assert serves(engine) == 0
        push(pusher, 1)
        assert serves(engine) == 1


def test_an_engine_without_a_receiver_is_told_how_to_get_one(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = bed()
    monkeypatch.setattr(engine, "do_server_info", lambda body: (200, {"tp_size": 1, "custom_weight_loader": []}))
    with Pusher([engine.url], config=CONFIG) as pusher, pytest.raises(SyncError, match="--custom-weight-loader"):
        push(pusher, 1)
    assert engine.requests == ["/server_info"]
