"""Engines that fetch new weights from a store: what the trainer puts arrives bit for bit, whatever fails on the way."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from die_with_parent import die_with_parent
from follow_model import NBYTES, Engine, trained
from miles_weightsync import Follower, PushConfig, PushConfigError, ShardError, SyncError
from miles_weightsync.cli import main
from miles_weightsync.delta import DeltaError, DeltaStore, StoreError
from miles_weightsync.delta.files import Files
from miles_weightsync.push import Pusher
from staged_bed import BedEngine, checkpoint
from staged_bed import shards as bed_shards
from test_staged import assert_serves
from weightsync_fakes import FakeEngine, shards, shm_names

MakeEngine = Callable[..., Engine]


@pytest.fixture
def make() -> Iterator[MakeEngine]:
    made: list[Engine] = []

    def make_one(**options: Any) -> Engine:
        made.append(Engine(**options))
        return made[-1]

    yield make_one
    for engine in made:
        engine.stop()


@pytest.fixture(params=["folder", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "store") if request.param == "folder" else f"memory://{uuid.uuid4().hex}"


@contextmanager
def following(follower: Follower) -> Iterator[list[Exception]]:
    """Steps one after another beside the test; what they raise is noted, and the next step follows."""
    raised: list[Exception] = []
    done = threading.Event()

    def run() -> None:
        while not done.is_set():
            try:
                follower.step()
            except Exception as error:
                raised.append(error)
            done.wait(0.02)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield raised
    finally:
        done.set()
        thread.join()
        follower.close()


def publish(store: str, *versions: int, full: bool = False, of: Callable[[int], Any] = trained) -> None:
    """As a trainer of one rank does, without waiting for engines."""
    config = PushConfig(way="store", store=store, timeout_s=1e-6, store_keep=9)
    with Pusher(["http://127.0.0.1:9"], config=config) as pusher:
        for version in versions:
            with pytest.raises(SyncError, match=f"after version {version} was published"):
                pusher.push(shards(of(version)), version=version)
            if full:
                pusher.close()


# ---- two trainer ranks, two engines


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], list[Engine], DeltaStore]:
    """What each rank saw, with a follower between them and two engines, one of two ranks."""
    folder = tmp_path_factory.mktemp("follow")
    store = str(folder / "store")
    outs = [folder / f"rank{rank}.json" for rank in range(2)]
    script = Path(__file__).with_name("follow_rank.py")
    with ExitStack() as held:
        engines = [Engine(), Engine(tp=2)]
        for engine in engines:
            held.callback(engine.stop)
        urls = [engine.url for engine in engines]
        raised = held.enter_context(following(Follower(store, urls, PushConfig(bucket_bytes=8192, timeout_s=20))))
        processes = [
            subprocess.Popen(
                [sys.executable, str(script), str(rank), "2", str(folder / "meet"), str(out), store, *urls]
            )
            for rank, out in enumerate(outs)
        ]
        try:
            assert [process.wait(timeout=100) for process in processes] == [0, 0]
        finally:
            for process in processes:
                process.kill()
                process.wait()
    assert raised == []
    return [json.loads(out.read_text()) for out in outs], engines, DeltaStore(store)


def test_each_version_of_two_ranks_reaches_both_engines_bit_for_bit(ranks: Any) -> None:
    seen_R, engines, _ = ranks
    for engine in engines:
        assert engine.served == [(version, True) for version in range(1, 7)]
    for seen in seen_R:
        assert [seen[str(version)]["ok"] for version in range(1, 7)] == [[True, True]] * 6


def test_what_follows_a_full_version_is_a_delta_and_smaller(ranks: Any) -> None:
    (seen, _), _, store = ranks
    assert seen["1"]["bytes"] == NBYTES  # replicas are put once
    assert [seen[str(v)]["kind"] for v in range(1, 7)] == ["full", "delta", "delta", "delta", "delta", "full"]
    assert all(seen[str(version)]["bytes"] < NBYTES / 5 for version in (2, 3, 4, 5))
    assert seen["6"]["reason"] == "this trainer has put no version of these shards yet"
    assert store.versions() == [6]  # the others are pruned: one full version is kept


def test_a_rank_that_fails_publishes_nothing_and_the_next_push_works(ranks: Any) -> None:
    for seen in ranks[0]:
        assert "rank 1: OSError: the optimizer state is gone" in seen["4: a rank fails"]["message"]
        told = seen["4: the disk is full"]["message"]
        assert "rank 1:" in told
        assert "No space left on device" in told
        assert "Free space" in told
        assert seen["4"]["error"] is None


def test_versions_do_not_go_back_nor_change(ranks: Any) -> None:
    for seen in ranks[0]:
        assert "Version 3 is older than 4" in seen["back to 3"]["message"]
        assert "Version 3 cannot follow version 4" in seen["3 by a new trainer"]["message"]
        for push in ("4 with other weights", "4 with other weights by a new trainer"):
            assert "Version 4 is in the store already, with other values of" in seen[push]["message"]


def test_a_version_that_is_there_is_not_put_again_and_serves_as_a_base(ranks: Any) -> None:
    for seen in ranks[0]:
        for push in ("4 again", "4 by a new trainer"):
            assert (seen[push]["error"], seen[push]["bytes"], seen[push]["kind"]) == (None, 0, None)
        assert seen["5"]["kind"] == "delta"


def test_ranks_must_agree_on_the_version(ranks: Any) -> None:
    for seen in ranks[0]:
        assert "different versions: [7, 8]" in seen["ranks differ"]["message"]


# ---- the trainer alone


def test_an_engine_without_a_follower_is_told_with_what_it_serves_and_what_to_run(url: str, make: MakeEngine) -> None:
    with_, without = make(), make()
    with_.version = "1"
    config = PushConfig(way="store", store=url, timeout_s=0.3)
    with Pusher([with_.url, without.url, "http://127.0.0.1:9"], config=config) as pusher:
        with pytest.raises(SyncError) as caught:
            pusher.push(shards(trained(1)), version=1)
        there, missing, silent = caught.value.engines
        assert (there.ok, there.serves, there.kind) == (True, 1, "full")
        assert (missing.ok, missing.phase, missing.written) == (False, "load", False)
        assert "it serves version default 0.3 s after version 1 was published" in str(missing.error)
        assert f"`miles-weightsync follow {url} --engine {without.url}` should be running" in str(missing.error)
        assert "it does not answer" in str(silent.error)
    assert DeltaStore(url).versions() == [1]


def test_a_version_that_changes_too_much_is_stored_whole(url: str) -> None:
    publish(url, 1)
    config = PushConfig(way="store", store=url, timeout_s=1e-6)
    other = {name: tensor + torch.rand(tensor.shape) for name, tensor in trained(2).items()}
    with Pusher(["http://127.0.0.1:9"], config=config) as pusher:
        for version, tensors in ((1, trained(1)), (2, other)):
            with pytest.raises(SyncError) as caught:
                pusher.push(shards(tensors), version=version)
    assert "a delta would have" in str(caught.value.engines[0].reason)
    assert DeltaStore(url).manifest(2).kind == "full"


def test_shards_that_make_no_whole_tensors_leave_the_store_alone(url: str) -> None:
    with (
        Pusher(["http://127.0.0.1:9"], config=PushConfig(way="store", store=url, timeout_s=1)) as pusher,
        pytest.raises(ShardError, match="cover 1920 of 3840 elements"),
    ):
        pusher.push(shards(trained(1), 0, 2), version=1)
    assert DeltaStore(url).versions() == []


def test_a_store_that_cannot_be_pruned_is_told_and_the_version_arrives(
    url: str, make: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make()

    def refuse(store: DeltaStore, *, keep_fulls: int) -> list[int]:
        raise PermissionError("read-only")

    monkeypatch.setattr(DeltaStore, "prune", refuse)
    config = PushConfig(way="store", store=url, timeout_s=20)
    with (
        following(Follower(url, [engine.url])),
        Pusher([engine.url], config=config) as pusher,
        pytest.warns(UserWarning, match="could not be pruned: read-only"),
    ):
        assert pusher.push(shards(trained(1)), version=1).engines[0].ok
    assert engine.holds(1)


def test_what_a_full_disk_left_of_one_version_makes_room_for_the_next(
    tmp_path: Path, make: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, write, left = make(), Files.write, [3]

    def full(files: Files, path: str, data: bytes | memoryview, *, exclusive: bool = False) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise StoreError("no space left on device")
        write(files, path, data, exclusive=exclusive)

    folders: set[tuple[str, ...]] = set()

    def beside(files: Files, path: str, data: bytes | memoryview, *, exclusive: bool = False) -> None:
        write(files, path, data, exclusive=exclusive)
        folders.add(tuple(path.name for path in (tmp_path / "parts").iterdir()))

    config = PushConfig(way="store", store=str(tmp_path), timeout_s=20)
    with following(Follower(str(tmp_path), [engine.url])), Pusher([engine.url], config=config) as pusher:
        with monkeypatch.context() as patch:
            patch.setattr(Files, "write", full)
            with pytest.raises(SyncError, match="no space left"):
                pusher.push(shards(trained(1)), version=1)
        assert [path.name for path in (tmp_path / "parts").iterdir()] == ["000000000001"]
        monkeypatch.setattr(Files, "write", beside)
        assert pusher.push(shards(trained(2)), version=2).engines[0].ok
    assert folders == {("000000000002",)}


def test_a_store_that_cannot_be_opened_is_told_by_the_push() -> None:
    with (
        Pusher(["http://127.0.0.1:9"], config=PushConfig(way="store", store="nosuch://x")) as pusher,
        pytest.raises(SyncError, match="rank 0: ValueError: Protocol not known: nosuch"),
    ):
        pusher.push(shards(trained(1)), version=1)


@pytest.mark.parametrize(("dtype", "nbytes"), [("bfloat16", NBYTES // 2), ("keep", NBYTES)])
def test_floating_point_is_stored_in_the_type_asked_for(url: str, make: MakeEngine, dtype: Any, nbytes: int) -> None:
    engine = make(dtype="bfloat16")
    with following(Follower(url, [engine.url], PushConfig(dtype="keep" if dtype == "bfloat16" else "auto"))):
        config = PushConfig(way="store", store=url, dtype=dtype, timeout_s=20)
        with Pusher([engine.url], config=config) as pusher:
            report = pusher.push(shards(trained(1)), version=1)
    assert report.bytes == nbytes
    assert all(torch.equal(t, trained(1)[n].bfloat16()) for n, t in engine.params.items())


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"way": "store"}, "`way = store` needs `store`"),
        ({"way": "store", "store": "x", "store_keep": 0}, "`store_keep` is 0"),
        ({"way": "store", "store": "x", "pause": "abort"}, "`pause = abort` has no effect with `way = store`"),
        ({"way": "store", "store": "x", "verify": "none"}, "`verify = none` has no effect"),
        ({"way": "store", "store": "x", "transport": "tcp"}, "`transport = tcp` has no effect"),
        ({"way": "store", "store": "x", "delta_history": 2}, "`delta_history = 2` has no effect"),
        ({"way": "store", "store": "x", "disk_dir": "/x"}, "`disk_dir` and `disk_template` have no effect"),
        ({"store": "x"}, "`store` and `store_keep` have no effect with `way = tensor`"),
        ({"way": "disk", "disk_dir": "/x", "store_keep": 3}, "have no effect with `way = disk`"),
    ],
    ids=str,
)
def test_settings_without_effect_are_refused(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(PushConfigError, match=message):
        PushConfig(**setting)


# ---- the follower alone


def test_a_step_does_nothing_where_nothing_is_new(url: str, make: MakeEngine) -> None:
    engine = make()
    with Follower(url, [engine.url]) as follower:
        assert follower.step() is None  # an empty store
        assert not follower.is_current
        publish(url, 1, 2)
        report = follower.step()
        assert report is not None
        assert report.version == 2
        assert engine.holds(2)
        assert follower.fetched is not None
        assert follower.fetched.kind == "full"
        assert follower.step() is None
        publish(url, 2, 3, 4)
        assert follower.step() is not None
        assert engine.holds(4)
        assert (follower.fetched.kind, follower.fetched.version) == ("delta", 4)
        assert follower.fetched.bytes < NBYTES / 5
        assert follower.is_current
    assert engine.served == [(2, True), (4, True)]


def test_an_engine_that_starts_again_or_late_gets_the_version_held(url: str, make: MakeEngine) -> None:
    first, late = make(), make()
    publish(url, 1)
    with Follower(url, [first.url, late.url]) as follower:
        late.do_model_info = lambda body: (503, {"message": "still loading"})  # type: ignore[method-assign]
        report = follower.step()
        assert report is not None
        assert [outcome.url for outcome in report.engines] == [first.url]
        assert "still loading" in follower.silent[late.url]
        assert not follower.is_current
        del late.do_model_info
        for tensor in first.params.values():
            tensor.zero_()
        first.version = "default"
        report = follower.step()
        assert report is not None
        assert len(report.engines) == 2
        assert first.holds(1)
        assert late.holds(1)
        assert follower.is_current


def test_what_an_engine_says_is_not_believed_before_it_was_pushed_to(url: str, make: MakeEngine) -> None:
    engine = make()
    publish(url, 1)
    engine.version, engine.is_paused, engine.has_session = "1", True, True  # another follower died in a push of 1
    with Follower(url, [engine.url]) as follower:
        assert follower.step() is not None
        assert follower.step() is None
    assert engine.served == [(1, True)]


def test_an_engine_that_fails_is_pushed_to_again(url: str, make: MakeEngine) -> None:
    good, bad = make(), make()
    publish(url, 1)
    with Follower(url, [good.url, bad.url]) as follower:
        bad.fail_at = 7
        with pytest.raises(SyncError, match="scripted failure"):
            follower.step()
        assert good.holds(1)
        assert bad.is_paused
        report = follower.step()
        assert report is not None
        assert [outcome.url for outcome in report.engines] == [bad.url]
        assert bad.holds(1)
    assert not bad.resumed_mixed


@pytest.mark.parametrize("damage", ["torn", "flipped", "gone"])
@pytest.mark.parametrize("kind", ["delta", "full"])
def test_a_damaged_part_is_named_engines_go_on_and_what_follows_arrives(
    tmp_path: Path, make: MakeEngine, kind: str, damage: str
) -> None:
    engine, store = make(), str(tmp_path)
    publish(store, 1)
    with Follower(store, [engine.url]) as follower:
        follower.step()
        publish(store, 1, 2) if kind == "delta" else publish(store, 2)
        manifest = DeltaStore(store).manifest(2)
        assert manifest.kind == kind
        path = tmp_path / manifest.parts[3].file
        good = path.read_bytes()
        if damage == "gone":
            path.unlink()
        else:
            path.write_bytes(good[:-3] if damage == "torn" else good[:-1] + bytes([good[-1] ^ 1]))
        for _ in range(2):
            with pytest.raises(StoreError, match=path.name):
                follower.step()
            assert engine.served == [(1, True)]
            assert not engine.is_paused
        engine.version = "default"  # it starts again meanwhile
        with pytest.raises(StoreError, match=path.name):
            follower.step()
        assert engine.served == [(1, True), (1, True)]
        path.write_bytes(good)
        assert follower.step() is not None
    assert engine.served[2:] == [(2, True)]


def test_a_store_that_is_pruned_while_it_is_read_is_asked_again(
    tmp_path: Path, make: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, store = make(), str(tmp_path)
    publish(store, 1)
    publish(store, 1, 2, 3)
    read, pruned = Files.read, list[int]()

    def read_or_prune(files: Files, path: str) -> bytes:
        if path.startswith("parts/000000000002") and not pruned:
            pruned.append(1)
            publish(store, 4)
            pruned.extend(DeltaStore(store).prune())
        return read(files, path)

    monkeypatch.setattr(Files, "read", read_or_prune)
    with Follower(store, [engine.url]) as follower:
        assert follower.step() is not None
    assert pruned == [1, 1, 2, 3]
    assert engine.served == [(4, True)]


def test_a_store_that_was_emptied_for_another_run_is_followed_anew(url: str, make: MakeEngine) -> None:
    engine = make()
    publish(url, 1, 2)
    with Follower(url, [engine.url]) as follower:
        follower.step()
        files = Files(url)
        for new in (2, 1):  # the same number, then an earlier one
            files.remove("manifests")
            files.remove("parts")
            if new == 2:
                publish(url, 1)
            publish(url, new, full=True)
            assert follower.step() is not None
            assert follower.fetched is not None
            assert follower.fetched.kind == "full"
    assert engine.served == [(2, True), (2, True), (1, True)]


def test_deltas_of_another_run_are_not_put_on_what_is_held(url: str, make: MakeEngine) -> None:
    engine = make()
    publish(url, 1)
    with Follower(url, [engine.url]) as follower:
        follower.step()
        files = Files(url)
        files.remove("manifests")
        files.remove("parts")
        publish(url, 1, 2, of=lambda version: trained(version + 2))
        assert follower.step() is not None
        assert follower.fetched is not None
        assert (follower.fetched.kind, follower.fetched.version) == ("full", 2)
    assert all(torch.equal(tensor, trained(4)[name]) for name, tensor in engine.params.items())


def test_a_copy_that_is_not_what_a_delta_was_made_against_is_fetched_whole(url: str, make: MakeEngine) -> None:
    engine = make()
    publish(url, 1)
    with Follower(url, [engine.url]) as follower:
        follower.step()
        for shard in follower._copy.shards():
            shard.tensor.zero_()
        publish(url, 1, 2)
        with pytest.raises(DeltaError, match="made against other old values"):
            follower.step()
        assert follower.step() is not None
    assert engine.served == [(1, True), (2, True)]


def test_reading_stays_below_the_limit_but_for_single_larger_parts(
    url: str, make: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, limit = make(), 20_000
    publish(url, 1)
    lock, in_flight, most = threading.Lock(), list[int](), list[tuple[int, int]]()
    restore = DeltaStore.restore

    def counted(store: DeltaStore, chain: Any, name: str) -> Any:
        nbytes = chain.full.part(name).nbytes
        with lock:
            in_flight.append(nbytes)
            most.append((sum(in_flight), len(in_flight)))
        try:
            return restore(store, chain, name)
        finally:
            with lock:
                in_flight.remove(nbytes)

    monkeypatch.setattr(DeltaStore, "restore", counted)
    with Follower(url, [engine.url], read_bytes=limit) as follower:
        follower.step()
    assert engine.holds(1)
    assert all(nbytes <= limit or count == 1 for nbytes, count in most)
    assert any(nbytes > limit for nbytes, _ in most)


def test_a_fetch_that_is_stopped_leaves_everything_as_it_was(
    url: str, make: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make()
    publish(url, 1)
    with Follower(url, [engine.url]) as follower:
        read = DeltaStore.read
        monkeypatch.setattr(DeltaStore, "read", lambda *given: (follower.stop(), read(*given))[1])
        assert follower.step() is None
        assert follower.version is None
    assert engine.served == []


def test_receivers_in_engines_are_reached_too(url: str, bed: Callable[..., BedEngine]) -> None:
    engine = bed(tp=2)
    engine.do_model_info = lambda body: (200, {"weight_version": engine.version})  # type: ignore[attr-defined]
    config = PushConfig(way="staged", bucket_bytes=4096, delta="off", timeout_s=20)
    trainer = PushConfig(way="store", store=url, timeout_s=20)
    with following(Follower(url, [engine.url], config)) as raised, Pusher([engine.url], config=trainer) as pusher:
        for version in (1, 2):
            pusher.push(bed_shards(checkpoint(1, steps=version)), version=version)
    assert raised == []
    assert_serves(engine, 1, steps=2, stamp=2)


def test_followers_that_cannot_work_are_refused(tmp_path: Path) -> None:
    store = str(tmp_path)
    with pytest.raises(PushConfigError, match="`engines` must name at least one URL"):
        Follower(store, [])
    with pytest.raises(PushConfigError, match="a follower pushes in another way"):
        Follower(store, ["http://127.0.0.1:9"], PushConfig(way="store", store=store))
    with pytest.raises(PushConfigError, match="`read_bytes` is 0"):
        Follower(store, ["http://127.0.0.1:9"], read_bytes=0)


# ---- the command


def start(store: str, engine: FakeEngine) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "miles_weightsync", "follow", store, "--engine", engine.url, "--poll-s", "0.05"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True, preexec_fn=die_with_parent)


def test_killed_in_a_push_the_next_process_brings_the_engine_on_and_ends_when_asked(
    tmp_path: Path, make: MakeEngine
) -> None:
    engine, store = make(), str(tmp_path / "store")
    publish(store, 1, 2)
    process: list[subprocess.Popen[str]] = []

    def kill(path: str) -> None:  # half of a push is in the engine
        if path == "/end_weight_update":
            engine.on_request = lambda path: None
            process[0].kill()

    engine.on_request = kill
    process.append(start(store, engine))
    _, told = process[0].communicate(timeout=60)
    assert process[0].returncode == -signal.SIGKILL, told
    assert engine.is_paused

    again = start(store, engine)
    try:
        engine.wait_for(2)
        publish(store, 2, 3)
        engine.wait_for(3)
        again.terminate()
        _, told = again.communicate(timeout=60)
    finally:
        again.kill()
    assert again.returncode == 0, told
    assert engine.served == [(2, True), (3, True)]
    assert shm_names(process[0].pid) == []  # what the killed one left, unless another pusher of this host was faster
    lines = [line for line in told.splitlines() if " version " in line]
    assert "version 2: full" in lines[0]
    assert "version 3: delta" in lines[1]
    assert "bytes read" in lines[1]
    assert "ends, holding version 3" in lines[2]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_in_a_push_lets_it_come_to_its_end(tmp_path: Path, make: MakeEngine, number: signal.Signals) -> None:
    engine, store = make(), str(tmp_path)
    publish(store, 1)
    engine.on_request = lambda path: os.kill(os.getpid(), number) if path == "/end_weight_update" else None
    before = signal.getsignal(number)
    assert main(["follow", store, "--engine", engine.url, "--poll-s", "60"]) == 0
    assert engine.served == [(1, True)]
    assert signal.getsignal(number) is before


def test_a_store_without_a_version_is_named_once(
    tmp_path: Path, make: MakeEngine, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    looks: list[object] = []

    def look(follower: Follower) -> None:
        looks.append(step(follower))
        if len(looks) == 3:
            follower.stop()

    step = Follower.step
    monkeypatch.setattr(Follower, "step", look)
    root = logging.getLogger()
    handlers, root.handlers = root.handlers, []
    try:
        assert main(["follow", str(tmp_path / "nothing"), "--engine", make().url, "--poll-s", "0.01"]) == 0
    finally:
        root.handlers = handlers
    assert capfd.readouterr().err.count("nothing has no version yet; waiting for the first") == 1


def test_what_a_version_says_of_its_tensors_is_read_or_refused(tmp_path: Path, make: MakeEngine) -> None:
    store = DeltaStore(str(tmp_path))
    part = store.put_full(1, "a[0:2]", np.zeros(2, np.uint32))
    for version, layout in enumerate(
        ("{", "[]", '{"a": {"boxes": [[[0, 2]]], "shape": [2], "dtype": "odd"}}'), start=1
    ):
        store.publish(version, [part], kind="full", metadata={"layout": layout})
        with Follower(store, [make().url]) as follower, pytest.raises(StoreError, match="cannot be read"):
            follower.step()


def test_one_look_says_by_its_status_whether_every_engine_serves_the_newest(
    tmp_path: Path, make: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, store = make(), str(tmp_path)
    command = ["follow", store, "--engine", engine.url, "--once"]
    assert main(command) == 1  # an empty store
    publish(store, 1)
    assert main([*command, "--engine", "http://127.0.0.1:9"]) == 1
    assert engine.holds(1)
    monkeypatch.setenv("ENGINE_KEY", "secret")
    assert main([*command, "--api-key-env", "ENGINE_KEY"]) == 0


def test_one_look_at_a_store_whose_client_fails_tells_why(
    tmp_path: Path, make: MakeEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(follower: Follower) -> None:
        raise LookupError("no such bucket")

    monkeypatch.setattr(Follower, "step", refuse)
    assert main(["follow", str(tmp_path), "--engine", make().url, "--once"]) == 1
    assert "LookupError: no such bucket" in caplog.text


def test_options_that_cannot_be_used_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["follow", str(tmp_path), "--engine", "http://127.0.0.1:9"]
    for more, told in (
        (["--transport", "tcp"], "`--transport` has no effect with `--way tensor`"),
        (["--poll-s", "0"], "`--poll-s` is 0.0; it must be positive"),
        (["--poll-s", "inf"], "`--poll-s` is inf; it must be positive, and finite"),
        (["--engine", "localhost:30000"], "'localhost:30000' is not the address of an engine"),
        (["--timeout-s", "0"], "`timeout_s` is 0.0"),
        (["--api-key-env", "NO_SUCH_KEY"], "no such environment variable"),
        (["--engine", "http://127.0.0.1:9"], "none twice"),
    ):
        assert main([*command, *more]) == 2
        assert told in capsys.readouterr().err
    assert main(["follow", "", "--engine", "http://127.0.0.1:9"]) == 2
    assert "`store` is empty" in capsys.readouterr().err
    assert main(["follow", "nosuch://x", "--engine", "http://127.0.0.1:9"]) == 2
    assert "nosuch" in capsys.readouterr().err
