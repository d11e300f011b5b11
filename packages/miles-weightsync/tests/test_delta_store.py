"""A store of versions: what is published is whole, what is not is never seen, and what is damaged is named."""

from __future__ import annotations

import errno
import json
import resource
import signal
import subprocess
import sys
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from delta_arrays import moved, weights
from fsspec.implementations.local import LocalFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st
from miles_weightsync.delta import (
    BaseVersionError,
    Chain,
    DeltaError,
    DeltaStore,
    StoreError,
    apply,
    decode,
    encode,
    encode_decoded,
)
from miles_weightsync.delta.manifest import _digest as manifest_digest

NAMES = ("model.embed", "rank 1/layers.0", "rank 2/layers.0", "ünïcode:name")


@pytest.fixture(params=["folder", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "store") if request.param == "folder" else f"memory://{uuid.uuid4().hex}"


class Training:
    """Versions of a few arrays, as a trainer would make them."""

    def __init__(self, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)
        types = (np.uint16, np.uint16, np.uint8, np.uint32)
        first = {name: weights(600, dtype, self._rng) for name, dtype in zip(NAMES, types, strict=True)}
        self.versions = {1: first}

    def arrays(self, version: int) -> dict[str, np.ndarray]:
        while version not in self.versions:
            newest = max(self.versions)
            old = self.versions[newest]
            self.versions[newest + 1] = {name: moved(array, 0.05, self._rng) for name, array in old.items()}
        return self.versions[version]

    def publish(self, store: DeltaStore, version: int, *, base: int | None, codec: Any = "fast") -> None:
        new = self.arrays(version)
        if base is None:
            parts = [store.put_full(version, name, array) for name, array in new.items()]
            store.publish(version, parts, kind="full")
        else:
            old = self.arrays(base)
            blobs = {name: encode(old[name], array, codec=codec) for name, array in new.items()}
            parts = [store.put_delta(version, name, blob) for name, blob in blobs.items()]
            store.publish(version, parts, kind="delta", base=base)

    def check(self, store: DeltaStore, version: int) -> None:
        chain = store.chain(None, version)
        for name, array in self.arrays(version).items():
            assert np.array_equal(store.restore(chain, name), array)


def test_versions_come_back_exactly_whatever_mix_of_deltas_leads_to_them(url: str):
    training, store = Training(), DeltaStore(url, full_every=3)
    base = None
    for version in range(1, 11):
        kind, reason = store.kind_for(version, base=base)
        assert kind == ("full" if version % 4 == 1 else "delta"), reason
        training.publish(store, version, base=base if kind == "delta" else None, codec=("fast", "small")[version % 2])
        base = version
    again = DeltaStore(url)
    assert again.versions() == list(range(1, 11))
    assert again.latest() == 10
    for version in range(1, 11):
        training.check(again, version)


def test_a_receiver_goes_from_what_it_holds_by_one_folded_delta(url: str):
    training, store = Training(), DeltaStore(url)
    training.publish(store, 1, base=None)
    for version in (2, 3, 4):
        training.publish(store, version, base=version - 1, codec=("fast", "small")[version % 2])
    chain = store.chain(2, 4)
    assert chain.full is None
    assert [manifest.version for manifest in chain.deltas] == [3, 4]
    assert 0 < chain.nbytes < store.chain(None, 1).nbytes
    for name in NAMES:
        held, new = training.arrays(2)[name].copy(), training.arrays(4)[name]
        whole = decode(encode_decoded(store.folded(chain, name, old=held)))
        stepwise = held.copy()
        apply(held, whole)
        assert np.array_equal(held, new)
        store.update(stepwise, chain, name, holds=2)
        assert np.array_equal(stepwise, new)
    with pytest.raises(StoreError, match="use `update`"):
        store.restore(chain, NAMES[0])


def test_a_delta_on_the_wrong_base_is_refused_with_both_versions_named(url: str):
    training, store = Training(), DeltaStore(url)
    with pytest.raises(BaseVersionError, match="Delta 2 belongs on version 1, but nothing is there"):
        training.publish(store, 2, base=1)
    training.publish(store, 1, base=None)
    training.publish(store, 2, base=1)
    with pytest.raises(BaseVersionError, match="Delta 4 belongs on version 3, but version 2 is there"):
        training.publish(store, 4, base=3)
    chain = store.chain(1, 2)
    array = training.arrays(3)[NAMES[0]].copy()
    with pytest.raises(BaseVersionError, match="Delta 2 belongs on version 1, but version 3 is there"):
        store.update(array, chain, NAMES[0], holds=3)
    with pytest.raises(DeltaError, match="made against other old values"):  # it says 1, and is 3
        store.update(array, chain, NAMES[0], holds=1)
    assert np.array_equal(array, training.arrays(3)[NAMES[0]])
    assert store.kind_for(4, base=3) == ("full", "the newest stored version is 2, not the base 3")


def test_an_update_that_fails_on_its_way_leaves_the_array_as_it_was(tmp_path: Path):
    training, store = Training(), DeltaStore(str(tmp_path))
    training.publish(store, 1, base=None)
    for version in (2, 3):
        training.publish(store, version, base=version - 1)
    chain = store.chain(1, 3)
    (tmp_path / chain.deltas[1].part(NAMES[0]).file).unlink()
    array = training.arrays(1)[NAMES[0]].copy()
    with pytest.raises(StoreError, match=r"parts/000000000003/.* is missing"):
        store.update(array, chain, NAMES[0], holds=1)
    assert np.array_equal(array, training.arrays(1)[NAMES[0]])


def test_nothing_is_seen_of_a_version_before_its_manifest(url: str):
    training, store = Training(), DeltaStore(url)
    training.publish(store, 1, base=None)
    parts = [store.put_full(2, name, array) for name, array in training.arrays(2).items()]
    assert DeltaStore(url).versions() == [1]
    assert DeltaStore(url).prune() == []  # and what ranks are writing is not swept away
    store.publish(2, parts, kind="full", metadata={"step": "200"})
    training.check(DeltaStore(url), 2)
    assert DeltaStore(url).manifest(2).metadata == {"step": "200"}


def test_ranks_write_at_the_same_time_and_one_record_of_each_is_enough(url: str):
    training, store = Training(), DeltaStore(url)
    arrays = training.arrays(1)

    def rank(name: str) -> Any:
        return DeltaStore(url).put_full(1, name, arrays[name])

    with ThreadPoolExecutor(4) as pool:
        parts = list(pool.map(rank, NAMES))
    store.publish(1, parts, kind="full")
    training.check(store, 1)


def test_what_does_not_fit_together_is_not_published(url: str):
    training, store = Training(), DeltaStore(url)
    parts = [store.put_full(1, name, array) for name, array in training.arrays(1).items()]
    with pytest.raises(StoreError, match=r"model\.embed more than once: ranks overlap"):
        store.publish(1, [*parts, parts[0]], kind="full")
    with pytest.raises(StoreError, match="is full and has base 0"):
        store.publish(1, parts, kind="full", base=0)
    with pytest.raises(StoreError, match="Version -1 is negative"):
        store.publish(-1, parts, kind="full")
    store._files.remove(parts[1].file)
    with pytest.raises(StoreError, match=f"{parts[1].file} is missing; version 1 is not published"):
        store.publish(1, parts, kind="full")
    store._files.write(parts[1].file, b"short")
    with pytest.raises(StoreError, match="has 5 bytes instead of 1200"):
        store.publish(1, parts, kind="full")
    assert store.versions() == []
    training.publish(store, 1, base=None)

    fewer = [store.put_delta(2, name, encode(a, a)) for name, a in list(training.arrays(1).items())[:3]]
    with pytest.raises(StoreError, match="1 parts of version 2 do not fit its base 1, the first ünïcode:name"):
        store.publish(2, fewer, kind="delta", base=1)
    with pytest.raises(StoreError, match="published already, with other contents"):
        store.publish(1, parts[:2], kind="full")
    training.publish(store, 3, base=None)
    with pytest.raises(StoreError, match="Version 2 cannot follow version 3"):
        training.publish(store, 2, base=None)
    with pytest.raises(StoreError, match="Version 3 cannot follow version 3"):
        store.kind_for(3, base=2)
    with pytest.raises(StoreError, match=r"Version 9 is not in the store"):
        store.chain(None, 9)


@pytest.mark.parametrize("damage", ["torn", "flipped", "gone"])
def test_damaged_files_are_named_and_a_full_version_heals_the_store(damage: str, tmp_path: Path):
    training, store = Training(), DeltaStore(str(tmp_path))
    training.publish(store, 1, base=None)
    training.publish(store, 2, base=1)
    chain = store.chain(None, 2)
    for path, why in (
        (tmp_path / store.manifest(1).part(NAMES[0]).file, "part"),
        (tmp_path / store.manifest(2).part(NAMES[0]).file, "part"),
        (tmp_path / "manifests/000000000002.json", "manifest"),
    ):
        good = path.read_bytes()
        if damage == "gone":
            path.unlink()
        else:
            path.write_bytes(good[:-7] if damage == "torn" else good.replace(good[40:41], bytes([good[40] ^ 1]), 1))
        if why == "part":
            with pytest.raises(StoreError, match=path.name):
                store.restore(chain, NAMES[0])
        elif damage != "gone":
            with pytest.raises(StoreError, match=r"000000000002\.json"):
                store.chain(None, 2)
            assert store.kind_for(3, base=2)[0] == "full"
        if why == "part":
            path.write_bytes(good)
    training.publish(store, 3, base=None)
    training.check(store, 3)
    store.prune()
    training.check(store, 3)
    assert store.versions() == [3]


def test_a_manifest_with_a_changed_number_is_refused(tmp_path: Path):
    training, store = Training(), DeltaStore(str(tmp_path))
    training.publish(store, 1, base=None)
    path = tmp_path / "manifests/000000000001.json"
    content = json.loads(path.read_text())
    content["manifest"]["parts"][0]["count"] += 1
    path.write_text(json.dumps(content))
    with pytest.raises(StoreError, match="damaged: its digest differs"):
        store.manifest(1)
    path.write_text(json.dumps({"manifest": 3}))
    with pytest.raises(StoreError, match="is no manifest"):
        store.manifest(1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "has format 2; this version of the package reads format 1"),
        ({"codec": "x"}, "has other fields"),
        ({"parts": [{"name": "a"}]}, "has other fields"),
        ({"version": "1"}, "has other fields"),
        ({"version": 7}, "is the manifest of version 7"),
        ({"kind": "delta", "base": 1}, "has base 1; a delta belongs on an earlier version"),
    ],
    ids=str,
)
def test_a_manifest_of_another_version_of_the_package_is_told_and_no_chain_goes_round(
    tmp_path: Path, change: dict[str, Any], message: str
):
    training, store = Training(), DeltaStore(str(tmp_path))
    training.publish(store, 1, base=None)
    path = tmp_path / "manifests/000000000001.json"
    content = json.loads(path.read_text())["manifest"] | change
    path.write_text(json.dumps({"manifest": content, "digest": manifest_digest(content)}))
    with pytest.raises(StoreError, match=message):
        store.chain(None, 1)


@settings(deadline=None, max_examples=25)
@given(kinds=st.lists(st.booleans(), min_size=1, max_size=9), keep=st.integers(1, 3))
def test_pruning_keeps_whatever_the_newest_full_version_leads_to(kinds: list[bool], keep: int):
    training, store = Training(), DeltaStore(f"memory://{uuid.uuid4().hex}")
    fulls = [1, *(v for v, is_full in enumerate(kinds, start=2) if is_full)]
    for version in range(1, len(kinds) + 2):
        training.publish(store, version, base=None if version in fulls else version - 1)
    newest = len(kinds) + 1
    store.put_full(newest, "left over", np.zeros(3, np.uint8))
    writing = store.put_full(newest + 1, "being written", np.zeros(3, np.uint8))
    first = fulls[-keep:][0]
    assert store.prune(keep_fulls=keep) == list(range(1, first))
    assert store.versions() == list(range(first, newest + 1))
    for version in store.versions():
        training.check(store, version)
    names = {
        f"{folder}/{name}" for folder in store._files.names("parts") for name in store._files.names(f"parts/{folder}")
    }
    kept = {part.file for version in store.versions() for part in store.manifest(version).parts}
    assert names == {file.removeprefix("parts/") for file in (*kept, writing.file)}


class CountingFiles(LocalFileSystem):
    """Counts the bytes written below `parts`, and has room for `room` of them."""

    cachable = False

    def __init__(self, room: int = 1 << 60) -> None:
        super().__init__()
        self.written, self.room = 0, room

    def open(self, path: Any, mode: Any = "rb", **options: Any) -> Any:
        file = super().open(path, mode, **options)
        if "w" in mode:
            plain = file.write

            def write(data: Any) -> int:
                fits = min(len(data), self.room - self.written)
                self.written += fits
                plain(data[:fits])
                if fits < len(data):
                    raise OSError(errno.ENOSPC, "No space left on device")
                return fits

            file.write = write
        return file


def test_parts_that_are_there_are_not_sent_again_unless_they_were_damaged(tmp_path: Path):
    training, files = Training(), CountingFiles()
    store = DeltaStore(str(tmp_path), filesystem=files)
    arrays = training.arrays(1)
    for name in NAMES[:3]:
        store.put_full(1, name, arrays[name])
    assert files.written == sum(arrays[name].nbytes for name in NAMES[:3])

    again = CountingFiles()  # after the crash
    resumed = DeltaStore(str(tmp_path), filesystem=again)
    torn, flipped = sorted((tmp_path / "parts/000000000001").iterdir())[:2]
    sizes = torn.stat().st_size + flipped.stat().st_size
    torn.write_bytes(torn.read_bytes()[:100])
    flipped.write_bytes(b"\1" + flipped.read_bytes()[1:])
    parts = [resumed.put_full(1, name, array) for name, array in arrays.items()]
    assert again.written == sizes + arrays[NAMES[3]].nbytes
    resumed.publish(1, parts, kind="full")
    training.check(resumed, 1)


def test_a_full_disk_is_a_clean_error_and_nothing_half_written_stays(tmp_path: Path):
    training = Training()
    total = sum(array.nbytes for array in training.arrays(2).values())
    for room in (0, 1, 700, total - 1, total, total + 100):
        folder = tmp_path / str(room)
        whole = DeltaStore(str(folder))
        training.publish(whole, 1, base=None)
        before = {path for path in folder.rglob("*") if path.is_file()}
        with pytest.raises(StoreError, match=r"could not be written: .*No space left on device.* Free space"):
            training.publish(DeltaStore(str(folder), filesystem=CountingFiles(room)), 2, base=None)
        assert whole.versions() == [1]
        training.check(whole, 1)
        left = {path for path in folder.rglob("*") if path.is_file()} - before
        assert all(path.stat().st_size in (600, 1200, 2400) and path.suffix != ".tmp" for path in left)  # whole parts
        training.publish(whole, 2, base=None)
        training.check(whole, 2)


def test_a_file_that_the_system_cuts_short_is_a_clean_error(tmp_path: Path):
    """A real failed write: the process may not make files of more than 1,000 bytes."""
    code = (
        "import numpy as np; from miles_weightsync.delta import DeltaStore, StoreError\n"
        f"store = DeltaStore({str(tmp_path)!r})\n"
        "store.put_full(1, 'fits', np.zeros(900, np.uint8))\n"
        "try:\n    store.put_full(1, 'large', np.zeros(3000, np.uint8))\n"
        "except StoreError as error:\n    print(error)\n"
    )

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))

    command = [sys.executable, "-B", "-c", code]
    done = subprocess.run(command, preexec_fn=limit, capture_output=True, text=True, timeout=60, check=True)
    assert "(3000 bytes) could not be written" in done.stdout
    (left,) = (tmp_path / "parts/000000000001").iterdir()
    assert left.name.startswith("fits-")


def test_killed_at_every_step_the_store_serves_a_whole_version_and_the_next_publish_succeeds(tmp_path: Path):
    script = Path(__file__).with_name("delta_crash.py")
    done = subprocess.run([sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-3000:]
    assert all(int(steps) > 20 for steps in done.stdout.split())


def test_settings_that_make_no_sense_are_refused(tmp_path: Path):
    with pytest.raises(StoreError, match="`full_every` is 0"):
        DeltaStore(str(tmp_path), full_every=0)
    with pytest.raises(StoreError, match="`keep_fulls` is 0"):
        DeltaStore(str(tmp_path)).prune(keep_fulls=0)
    assert Chain(full=None, deltas=()).nbytes == 0
