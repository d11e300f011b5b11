"""Deltas are exact, the same from every instruction set, and refuse whatever is not theirs."""

from __future__ import annotations

import dataclasses
import logging
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from delta_arrays import DTYPES, ISAS, moved, pairs, weights
from hypothesis import given, settings
from hypothesis import strategies as st
from miles_weightsync.delta import (
    Codec,
    Decoded,
    DeltaError,
    apply,
    apply_blob,
    choose,
    decode,
    encode,
    encode_decoded,
    fold,
    undo,
)
from miles_weightsync.delta import blob as blobs
from miles_weightsync.errors import WeightSyncError
from miles_weightsync.native import build, library
from miles_weightsync.native.library import using

CODECS: tuple[Codec, ...] = ("fast", "small")
codecs = st.sampled_from(CODECS)
PATHS = [*ISAS, "numpy"]
paths = st.sampled_from(PATHS)


@settings(deadline=None, max_examples=250)
@given(pair=pairs(), codec=codecs, path=paths)
def test_a_delta_turns_old_into_new_and_back_again_the_same_on_every_path(
    pair: tuple[np.ndarray, np.ndarray], codec: Codec, path: str
):
    old, new = pair
    with using("numpy"):
        expected = encode(old, new, codec=codec)
    with using(path):
        assert encode(old, new, codec=codec) == expected
        found = decode(expected, old=old)
        assert np.array_equal(found.positions, np.flatnonzero(old != new))
        assert np.array_equal(found.diffs, (new - old)[found.positions])
        target = old.copy()
        apply(target, found)
        assert np.array_equal(target, new)
        undo(target, found)
        assert np.array_equal(target, old)
        apply_blob(target, expected)
        assert np.array_equal(target, new)


@settings(deadline=None, max_examples=100)
@given(pair=pairs(), codec=codecs, path=paths, columns=st.integers(1, 70), extra=st.integers(0, 9))
def test_rows_that_lie_apart_are_patched_and_what_lies_between_is_not(
    pair: tuple[np.ndarray, np.ndarray], codec: Codec, path: str, columns: int, extra: int
):
    old, new = pair
    blob, stride = encode(old, new, codec=codec), columns + extra
    where = np.arange(old.size) // columns * stride + np.arange(old.size) % columns
    target = np.full(-(-old.size // columns) * stride, 7, old.dtype)
    target[where] = old
    expected = target.copy()
    expected[where] = new
    before = target.copy()
    with using(path):
        apply_blob(target, blob, columns=columns, row_stride=stride)
        assert np.array_equal(target, expected)
        undo(target, decode(blob, old=old), columns=columns, row_stride=stride)
        assert np.array_equal(target, before)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gaps_at_every_border_of_their_coding_come_back(dtype: type, path: str):
    borders = [1, 2, 253, 254, 255, 256, 507, 508, 509, 254 * 8, 254 * 9 - 1, 254 * 9, 254 * 9 + 1, 65023, 65024, 65536]
    for every in (1, 40):  # many changes make narrow tracks, few make wide ones
        gaps = np.concatenate([np.ones(1 if every == 1 else 9000, int), np.repeat(borders, every)])
        positions = np.cumsum(gaps) - 1
        old = np.zeros(int(positions[-1]) + 3, dtype)
        new = old.copy()
        new[positions] = np.arange(1, positions.size + 1) % 251 + 1
        with using("numpy"):
            expected = encode(old, new)
        with using(path):
            assert encode(old, new) == expected
            back = decode(expected)
            assert np.array_equal(back.positions, positions)
            assert decode(encode_decoded(back)).positions.tolist() == positions.tolist()


@pytest.mark.parametrize("path", PATHS)
def test_positions_beyond_32_bits_are_written_and_read(path: str):
    positions = np.array([0, 2**31, 2**32 - 1, 2**32, 2**32 + 255, 2**33, 2**40, 2**40 + 1, 2**54], np.uint64)
    for count in (2**54 + 1, 2**55):
        big = Decoded(count=count, positions=positions, diffs=np.arange(1, 10, dtype=np.uint16))
        with using("numpy"):
            expected = encode_decoded(big)
        with using(path):
            assert encode_decoded(big) == expected
            back = decode(expected)
        assert back.count == count
        assert back.positions.dtype == np.uint64
        assert np.array_equal(back.positions, positions)
        assert np.array_equal(back.diffs, big.diffs)
    assert fold([big, big]).diffs.tolist() == [2 * d for d in range(1, 10)]
    just = Decoded(count=2**32 - 1, positions=np.array([2**32 - 2], np.uint32), diffs=np.ones(1, np.uint8))
    assert decode(encode_decoded(just)).positions.dtype == np.uint32
    assert decode(encode_decoded(dataclasses.replace(just, count=2**32))).positions.dtype == np.uint64


@pytest.mark.parametrize("path", PATHS)
def test_positions_of_64_bits_patch_like_those_of_32(path: str):
    rng = np.random.default_rng(0)
    old = weights(5000, np.uint16, rng)
    narrow = decode(encode(old, moved(old, 0.1, rng)))
    wide = dataclasses.replace(narrow, positions=narrow.positions.astype(np.uint64))
    with using(path):
        one, other = old.copy(), old.copy()
        apply(one, narrow)
        apply(other, wide)
        assert np.array_equal(one, other)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("codec", CODECS)
def test_a_delta_on_other_values_is_refused_and_changes_nothing(codec: Codec, path: str):
    rng = np.random.default_rng(1)
    old = weights(20_000, np.uint16, rng)
    new = moved(old, 0.05, rng)
    blob, other = encode(old, new, codec=codec), weights(20_000, np.uint16, rng)
    delta = decode(blob, old=old)
    with using(path):
        for target in (new, other):  # put on twice; put on something else
            before = target.copy()
            for wrong in (lambda t=target: apply_blob(t, blob), lambda t=target: apply(t, delta)):
                with pytest.raises(DeltaError, match="made against other old values"):
                    wrong()
                assert np.array_equal(target, before)
            with pytest.raises(DeltaError, match="made against other old values"):
                decode(blob, old=target)
        with pytest.raises(DeltaError, match="made against other old values"):
            undo(old.copy(), delta)
        spread = np.repeat(new, 2)  # two columns of a row of four: rows of another layout
        with pytest.raises(DeltaError, match="made against other old values"):
            apply_blob(spread, blob, columns=2, row_stride=4)


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32), steps=st.integers(1, 5), dtype=st.sampled_from(DTYPES), codec=codecs)
def test_a_folded_chain_does_what_its_deltas_do_in_turn(seed: int, steps: int, dtype: type, codec: Codec):
    rng = np.random.default_rng(seed)
    versions = [weights(900, dtype, rng)]
    for _ in range(steps):
        versions.append(moved(versions[-1], 0.2, rng))
    deltas = [decode(encode(a, b, codec=codec), old=a) for a, b in pairwise(versions)]
    whole = fold(deltas)
    assert np.array_equal(whole.positions, np.flatnonzero(versions[0] != versions[-1]))
    target = versions[0].copy()
    apply(target, decode(encode_decoded(whole)))
    assert np.array_equal(target, versions[-1])


def test_chains_that_do_not_fit_are_refused():
    one = Decoded(count=5, positions=np.array([1], np.uint32), diffs=np.ones(1, np.uint8))
    with pytest.raises(DeltaError, match="Delta 1 of the chain is of 6 uint8, the first of 5 uint8"):
        fold([one, dataclasses.replace(one, count=6)])
    with pytest.raises(DeltaError, match="nothing to fold"):
        fold([])


def test_arrays_that_no_delta_can_be_made_of_are_refused_with_their_shape():
    good = np.zeros(4, np.uint16)
    for bad, why in (
        (np.zeros(4, np.float32), "float32"),
        (np.zeros((2, 2), np.uint16), r"\(2, 2\)"),
        (np.zeros(8, np.uint16)[::2], "contiguous"),
        (np.zeros(9, np.uint8)[1:].view(np.uint16), "aligned"),
    ):
        with pytest.raises(DeltaError, match=why):
            encode(bad, good)
    with pytest.raises(DeltaError, match="old has 4 uint16, new 5 uint16"):
        encode(good, np.zeros(5, np.uint16))
    with pytest.raises(DeltaError, match="no codec 'tiny'"):
        encode(good, good, codec="tiny")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("path", PATHS)
def test_targets_that_do_not_fit_are_refused_with_both_sizes(path: str):
    old = np.arange(100, dtype=np.uint16)
    for codec in CODECS:
        blob = encode(old, old + np.uint16(1), codec=codec)
        delta = decode(blob, old=old)
        with using(path):
            for wrong, why in (
                (np.zeros(99, np.uint16), "100 elements.*99"),
                (np.zeros(100, np.uint8), "uint8"),
                (np.zeros((10, 10), np.uint16), r"\(10, 10\)"),
                (np.zeros(200, np.uint16)[::2], "contiguous"),
            ):
                with pytest.raises(DeltaError, match=why):
                    apply(wrong, delta)
                with pytest.raises(DeltaError):
                    apply_blob(wrong, blob)
            frozen = old.copy()
            frozen.flags.writeable = False
            with pytest.raises(DeltaError, match="read-only"):
                apply_blob(frozen, blob)
            with pytest.raises(DeltaError, match="both or none"):
                apply_blob(old.copy(), blob, columns=4)
            with pytest.raises(DeltaError, match="cannot begin 3 elements apart"):
                apply_blob(old.copy(), blob, columns=4, row_stride=3)
            with pytest.raises(DeltaError, match="rows of 10, 12 apart; the target has 117"):
                apply_blob(np.zeros(117, np.uint16), blob, columns=10, row_stride=12)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("rows", [{}, {"columns": 4, "row_stride": 6}])
def test_changes_made_by_hand_cannot_write_beyond_their_target(rows: dict[str, int], path: str):
    steps = np.ones(2, np.uint16)
    for positions in ([2, 8], [5, 4], [3, 3], [0, 2**32 - 1]):
        wrong = Decoded(count=8, positions=np.array(positions, np.uint32), diffs=steps)
        target, whole = guarded(np.zeros(12 if rows else 8, np.uint16))
        with using(path):
            for change in (apply, undo):
                with pytest.raises(DeltaError, match="its 8 elements"):
                    change(target, wrong, **rows)
            with pytest.raises(DeltaError, match="below its 8 elements"):
                encode_decoded(wrong)
        assert not target.any()
        assert np.all(whole[:512] == 0x5A)
    mixed = Decoded(count=8, positions=np.array([1, 2], np.int64), diffs=steps)
    with pytest.raises(DeltaError, match="int64"):
        apply(np.zeros(8, np.uint16), mixed)
    with pytest.raises(DeltaError, match="as many positions"):
        apply(np.zeros(8, np.uint16), Decoded(count=8, positions=np.array([1], np.uint32), diffs=steps))


def test_a_small_delta_says_that_it_needs_the_old_values():
    old = np.arange(100, dtype=np.uint16)
    with pytest.raises(DeltaError, match="pass `old`"):
        decode(encode(old, old + np.uint16(1), codec="small"))


@pytest.mark.parametrize("codec", CODECS)
def test_every_flipped_byte_and_every_cut_of_a_delta_is_noticed(codec: Codec):
    rng = np.random.default_rng(2)
    old = weights(3000, np.uint16, rng)
    blob = encode(old, moved(old, 0.05, rng, far=True), codec=codec)
    for at in range(len(blob)):
        broken = bytearray(blob)
        broken[at] ^= 1 << int(rng.integers(8))
        with pytest.raises(DeltaError):
            decode(bytes(broken), old=old)
    for length in range(len(blob)):
        with pytest.raises(DeltaError):
            decode(blob[:length], old=old)
    with pytest.raises(DeltaError, match="should have"):
        decode(blob + b"x", old=old)


def guarded(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A copy of `values` amid canaries, and the whole."""
    whole = np.full(values.size + 1024, 0x5A, values.dtype)
    inner = whole[512 : 512 + values.size]
    inner[:] = values
    return inner, whole


@settings(deadline=None, max_examples=300)
@given(data=st.data(), codec=codecs, path=paths)
def test_forged_deltas_end_in_an_error_or_within_their_target(data: st.DataObject, codec: Codec, path: str):
    """Streams and numbers changed behind the digest's back: what a faulty sender would send."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    dtype = data.draw(st.sampled_from(DTYPES))
    old = weights(int(rng.integers(0, 400)), dtype, rng)
    blob = blobs.read_blob(encode(old, moved(old, 0.2, rng, far=True), codec=codec))
    tracks = list(blob.tracks)
    for _ in range(data.draw(st.integers(1, 3))):
        k, what = int(rng.integers(len(tracks))), int(rng.integers(12))
        track = tracks[k]
        streams = list(track.streams)
        i = what % 6
        if what < 6 and streams[i].size:
            streams[i] = streams[i].copy()
            streams[i][rng.integers(streams[i].size)] = rng.choice([0, 1, 15, 127, 253, 254, 255])
        elif what < 10:
            streams[i] = np.concatenate([streams[i], rng.integers(0, 256, int(rng.integers(1, 17)), dtype=np.uint8)])
        else:
            streams[i] = streams[i][: -int(rng.integers(1, 3))]
        changes = track.changes + int(rng.choice([0, 0, 0, 1, -1, 100])) if what == 11 else track.changes
        elements = max(0, track.elements + int(rng.choice([0, 0, 0, 1, -1, 2**33])) if what == 10 else track.elements)
        floor = int(rng.choice([track.floor, 0, 8, 300])) if what == 9 else track.floor
        tracks[k] = dataclasses.replace(
            track, streams=tuple(streams), changes=max(changes, 0), elements=elements, floor=floor
        )
    forged = dataclasses.replace(
        blob, tracks=tuple(tracks), changes=sum(t.changes for t in tracks), witness=None if rng.random() < 0.7 else 1
    )
    target, whole = guarded(old)
    with using(path):
        try:
            apply_blob(target, blobs.write_blob(forged))
        except DeltaError:
            assert np.array_equal(target, old)
    assert np.all(whole[:512] == 0x5A)
    assert np.all(whole[512 + old.size :] == 0x5A)


@settings(deadline=None, max_examples=150)
@given(seed=st.integers(0, 2**32), codec=codecs, path=paths)
def test_flipped_bytes_under_a_matching_digest_end_in_an_error_or_within_the_target(seed: int, codec: Codec, path: str):
    rng = np.random.default_rng(seed)
    old = weights(500, np.uint16, rng)
    broken = bytearray(encode(old, moved(old, 0.1, rng, far=True), codec=codec))
    start = blobs._HEADER.size + blobs._DIGEST_BYTES
    for _ in range(int(rng.integers(1, 4))):
        at = int(rng.integers(6, len(broken)))
        if not blobs._HEADER.size <= at < start:
            broken[at] = int(rng.integers(256))
    header, payload = bytes(broken[: blobs._HEADER.size]), bytes(broken[start:])
    target, whole = guarded(old)
    with using(path):
        try:
            apply_blob(target, header + blobs._digest(header, payload) + payload)
        except DeltaError:
            assert np.array_equal(target, old)
    assert np.all(whole[:512] == 0x5A)
    assert np.all(whole[512 + old.size :] == 0x5A)


def test_classes_make_a_delta_smaller_where_small_weights_move_more():
    rng = np.random.default_rng(3)
    old = weights(400_000, np.uint16, rng)
    chance = np.minimum(0.4, 0.004 * 2.0 ** (122.0 - (old >> 7 & 0xFF)))
    new = old + np.where(rng.random(old.size) < chance, rng.choice([1, -1], old.size), 0).astype(np.int16).view(
        np.uint16
    )
    fast, small = (len(encode(old, new, codec=codec)) for codec in CODECS)
    assert small < 0.9 * fast


def test_what_does_not_pay_is_sent_whole_and_the_reason_is_said():
    rng = np.random.default_rng(4)
    old = weights(300_000, np.uint16, rng)
    few, many = moved(old, 0.02, rng), rng.permutation(old)
    chosen = choose(old, few)
    assert chosen.kind == "delta"
    assert chosen.blob is not None
    assert chosen.nbytes == len(chosen.blob) < chosen.full_bytes / 20
    assert "% of the full size" in chosen.reason
    for base, new, options, why in (
        (None, few, {}, "holds no base"),
        (old[:-1], few, {}, "299999 uint16 and the new version 300000 uint16"),
        (old, many, {}, "of a sample change"),
        (old, few, {"max_ratio": 0.0001}, "over 0.0001 of the full size"),
        (old, few, {"link_bytes_per_s": 1e15}, "the full array"),
        (old[:0], few[:0], {}, "nothing to send"),
    ):
        chosen = choose(base, new, **options)
        assert (chosen.kind, chosen.nbytes, chosen.blob) == ("full", new.nbytes, None)
        assert why in chosen.reason
    assert choose(old, few, link_bytes_per_s=1e6).kind == "delta"


def test_an_instruction_set_that_is_not_here_is_refused():
    with pytest.raises(WeightSyncError, match="no kernels for sse9"), using("sse9"):
        pass


def test_without_kernels_numpy_does_it_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    rng = np.random.default_rng(5)
    old = weights(1000, np.uint16, rng)
    new = moved(old, 0.1, rng)
    expected = [encode(old, new, codec=codec) for codec in CODECS]
    monkeypatch.setattr(library, "_FOLDER", tmp_path)
    cached = (library._table, library._load, library._reason)
    for function in cached:
        function.cache_clear()
    try:
        with caplog.at_level(logging.WARNING, "miles_weightsync"):
            assert [encode(old, new, codec=codec) for codec in CODECS] == expected
            assert library.instruction_set() == "numpy"
        said = [record.getMessage() for record in caplog.records]
        assert len(said) == 1
        assert "the CPU kernels are not built" in said[0]
        assert f"python -m {build.__package__}.build" in said[0]
    finally:
        monkeypatch.undo()
        for function in cached:
            function.cache_clear()


@pytest.mark.skipif(build.find_compiler() is None, reason="no C++ compiler here")
def test_the_kernels_are_built_here_and_of_these_sources():
    assert ISAS, library._reason()
