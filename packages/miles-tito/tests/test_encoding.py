"""Records survive the wire; damaged, foreign and newer bytes are refused with the reason."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from miles_tito import (
    Episode,
    EpisodeResult,
    FailedAttempt,
    FinishReason,
    Group,
    Outcome,
    Policy,
    Prompt,
    RecordError,
    Sample,
    SampleError,
    Sampling,
    Trajectory,
    TrajectoryKind,
    VersionSpan,
    WireError,
    summarize,
)
from miles_tito.records import encoding
from miles_tito.shared.safetensors import read_tensors, write_tensors

NAMES = st.text(min_size=1, max_size=12)
NUMBERS = st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
SCALARS = st.none() | st.booleans() | NUMBERS | st.text(max_size=20)
PLAIN = st.dictionaries(
    st.text(max_size=8), st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3), max_leaves=6), max_size=4
)
REWARDS = st.floats(-1e6, 1e6)


def same(left: Any, right: Any) -> bool:
    """Equality of records that hold arrays; types count."""
    if dataclasses.is_dataclass(left):
        names = [field.name for field in dataclasses.fields(left)]
        return type(left) is type(right) and all(same(getattr(left, n), getattr(right, n)) for n in names)
    if isinstance(left, np.ndarray):
        return isinstance(right, np.ndarray) and left.dtype == right.dtype and np.array_equal(left, right)
    if isinstance(left, (list, tuple)):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    return type(left) is type(right) and left == right


@st.composite
def token_fields(draw: st.DrawFn) -> dict[str, Any]:
    length = draw(st.integers(0, 24))
    mask = draw(hnp.arrays(np.bool_, length))
    logprobs = draw(hnp.arrays(np.float32, length, elements=st.floats(-50, 0, width=32)))
    fields: dict[str, Any] = {
        "tokens": draw(hnp.arrays(np.int32, length, elements=st.integers(0, 2**31 - 1))),
        "loss_mask": mask,
        "logprobs": np.where(mask, logprobs, np.float32(0)),
        "temperature": draw(st.floats(0.01, 10)),
        "metadata": draw(PLAIN),
    }
    if length:
        cut = draw(st.integers(0, length))
        ends = [(0, cut), (cut, length)]
        fields["versions"] = tuple(
            VersionSpan(start=start, end=end, version=draw(st.integers(-1, 99))) for start, end in ends if start < end
        )
    if draw(st.booleans()):
        layers = draw(st.integers(1, 3))
        dtype = draw(st.sampled_from([np.uint8, np.uint16]))
        fields["routed_experts"] = draw(hnp.arrays(dtype, (length, layers, 2)))
        fields["routed_mask"] = draw(hnp.arrays(np.bool_, length))
        fields["routed_layers"] = tuple(range(layers))
    return fields


@st.composite
def trajectories(draw: st.DrawFn, id: str = "t") -> Trajectory:
    return Trajectory(
        id=id,
        parent_id=draw(st.none() | NAMES),
        kind=draw(st.sampled_from(TrajectoryKind)),
        finish_reason=draw(st.sampled_from(FinishReason)),
        adapter=draw(st.none() | NAMES),
        multimodal=draw(st.none() | PLAIN),
        **draw(token_fields()),
    )


FAILED_ATTEMPTS = st.builds(
    FailedAttempt,
    attempt=st.integers(0, 9),
    outcome=st.just(Outcome.INFRA_ABORT),
    error=NAMES,
    seconds=st.floats(0, 1e6),
    finished_at=st.floats(0, 1e10),
)


@st.composite
def groups(draw: st.DrawFn) -> Group:
    group_id, prompt_id = draw(NAMES), draw(NAMES)
    episodes: list[Episode] = []
    for n in range(draw(st.integers(0, 3))):
        outcome = draw(st.sampled_from(Outcome))
        episodes.append(
            Episode(
                id=f"e{n}",
                prompt_id=prompt_id,
                group_id=group_id,
                outcome=outcome,
                reward=draw(REWARDS) if outcome.has_reward else None,
                error=None if outcome.has_reward else draw(NAMES),
                trajectories=tuple(draw(trajectories(id=f"e{n}:{k}")) for k in range(draw(st.integers(0, 2)))),
                metrics=draw(st.dictionaries(NAMES, REWARDS, max_size=3)),
                seconds=draw(st.floats(0, 1e6)),
                finished_at=draw(st.none() | st.floats(0, 1e10)),
                failed_attempts=tuple(draw(st.lists(FAILED_ATTEMPTS, max_size=2))),
            )
        )
    return Group(id=group_id, prompt_id=prompt_id, episodes=tuple(episodes), metadata=draw(PLAIN))


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    fields = draw(token_fields())
    length = len(fields["tokens"])
    column = st.none() | hnp.arrays(np.float32, length, elements=st.floats(-50, 0, width=32))
    return Sample(
        id=draw(NAMES),
        episode_id=draw(NAMES),
        group_id=draw(NAMES),
        prompt_id=draw(NAMES),
        advantage=draw(st.floats(-100, 100) | hnp.arrays(np.float32, length, elements=st.floats(-9, 9, width=32))),
        loss_denominator=int(fields["loss_mask"].sum()) + draw(st.integers(1, 9)),
        reward=draw(st.none() | REWARDS),
        ref_logprobs=draw(column),
        teacher_logprobs=draw(column),
        **fields,
    )


SAMPLINGS = st.builds(
    Sampling,
    temperature=st.floats(0, 5),
    top_p=st.floats(0.01, 1),
    top_k=st.just(-1) | st.integers(1, 100),
    min_p=st.floats(0, 1),
    max_tokens=st.integers(1, 9999),
    stop=st.lists(NAMES, max_size=2).map(tuple),
    stop_token_ids=st.lists(st.integers(0, 9), max_size=2).map(tuple),
    seed=st.none() | st.integers(0, 99),
)
PROMPTS = st.builds(
    Prompt,
    id=NAMES,
    messages=st.none() | st.lists(st.fixed_dictionaries({"role": NAMES, "content": NAMES}), max_size=3).map(tuple),
    tokens=st.none() | hnp.arrays(np.int32, st.integers(0, 9)),
    task=PLAIN,
    images=st.lists(st.binary(max_size=9), max_size=2).map(tuple),
    metadata=PLAIN,
)
SMALL = st.one_of(
    SAMPLINGS,
    PROMPTS,
    st.builds(Policy, base_url=NAMES, api_key=NAMES, model=NAMES, sampling=SAMPLINGS, session_id=NAMES),
    st.builds(EpisodeResult, outcome=st.just(Outcome.GRADED), reward=REWARDS, metrics=st.dictionaries(NAMES, REWARDS)),
    st.builds(EpisodeResult, outcome=st.just(Outcome.VERIFIER_INVALID), error=NAMES),
)


@given(SMALL)
def test_small_records_come_back_equal(record: Any):
    assert same(record, encoding.decode(encoding.encode(record), type(record)))


@settings(max_examples=40)
@given(groups())
def test_a_group_its_episodes_and_its_summary_come_back_equal(group: Group):
    assert same(group, encoding.decode(encoding.encode(group), Group))
    assert same(group.episodes, encoding.decode_many(encoding.encode_many(group.episodes, Episode), Episode))
    ref = dataclasses.replace(summarize(group), handle=None)
    assert same(ref, encoding.decode(encoding.encode(ref), type(ref)))


@settings(max_examples=40)
@given(st.lists(samples(), max_size=3))
def test_samples_come_back_equal_from_msgpack_and_safetensors(rows: list[Sample]):
    assert same(tuple(rows), encoding.decode_many(encoding.encode_many(rows, Sample), Sample))
    assert same(rows, encoding.samples_from_safetensors(encoding.samples_to_safetensors(rows)))


@settings(max_examples=25)
@given(st.data())
def test_torn_bytes_are_refused_wherever_they_end(data: st.DataObject):
    whole = encoding.encode(data.draw(trajectories()))
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(WireError, match=rf"{cut} bytes"):
        encoding.decode(whole[:cut], Trajectory)


@settings(max_examples=50)
@given(st.data())
def test_damaged_bytes_give_a_record_error_or_a_valid_record_but_nothing_else(data: st.DataObject):
    whole = bytearray(encoding.encode(data.draw(trajectories())))
    whole[data.draw(st.integers(0, len(whole) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with contextlib.suppress(RecordError):
        encoding.decode(bytes(whole), Trajectory)


def trajectory(**changes: Any) -> Trajectory:
    fields: dict[str, Any] = {
        "id": "t",
        "tokens": [1, 2],
        "loss_mask": [False, True],
        "logprobs": [0.0, -1.0],
        "versions": (VersionSpan(start=1, end=2, version=3),),
    }
    return Trajectory(**{**fields, **changes})


def repacked(data: bytes, change: Any) -> bytes:
    envelope = msgspec.msgpack.decode(data)
    change(envelope)
    return msgspec.msgpack.encode(envelope)


def test_a_newer_schema_is_refused_with_both_numbers():
    def newer(envelope: list[Any]) -> None:
        envelope[1] = 7

    with pytest.raises(WireError, match="schema 7; this miles-tito reads 1: upgrade"):
        encoding.decode(repacked(encoding.encode(trajectory()), newer), Trajectory)


def test_an_unknown_field_is_refused_by_name():
    def grown(envelope: list[Any]) -> None:
        envelope[4]["from_the_future"] = 1

    with pytest.raises(WireError, match="unknown \\['from_the_future'\\]"):
        encoding.decode(repacked(encoding.encode(trajectory()), grown), Trajectory)


def test_a_broken_record_is_refused_with_its_own_numbers():
    def shorter(envelope: list[Any]) -> None:
        envelope[4]["versions"][0]["end"] = 5

    with pytest.raises(RecordError, match=r"\[1, 5\).*the 2 tokens"):
        encoding.decode(repacked(encoding.encode(trajectory()), shorter), Trajectory)


def test_another_type_and_foreign_bytes_are_named():
    with pytest.raises(WireError, match="hold one Trajectory, not one Group"):
        encoding.decode(encoding.encode(trajectory()), Group)
    with pytest.raises(WireError, match="no Miles record"):
        encoding.decode(msgspec.msgpack.encode({"a": 1}), Group)


def test_a_handle_does_not_travel_silently():
    group = Group(id="g", prompt_id="p", episodes=())
    with pytest.raises(WireError, match="GroupRef g carries a Group as handle"):
        encoding.encode(summarize(group))


def test_an_object_in_metadata_is_refused_by_type():
    with pytest.raises(WireError, match="object is not plain data"):
        encoding.encode(trajectory(metadata={"x": object()}))


def test_metadata_that_json_would_change_is_refused():
    row = Sample(
        id="s",
        episode_id="e",
        group_id="g",
        prompt_id="p",
        tokens=[1],
        loss_mask=[False],
        logprobs=[0.0],
        advantage=0.0,
        loss_denominator=1,
        metadata={"blob": b"\x00"},
    )
    with pytest.raises(WireError, match=r"sample s \(row 0\) does not survive JSON"):
        encoding.samples_to_safetensors([row])


def test_decoded_arrays_are_views_of_the_bytes_where_they_are_aligned():
    data = write_tensors({"a": np.arange(5, dtype=np.int32), "b": np.array([True])}, {"k": "v"})
    tensors, metadata = read_tensors(data)
    assert metadata == {"k": "v"}
    assert tensors["a"].flags.aligned
    assert not tensors["a"].flags.owndata
    assert tensors["a"].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("size", [0, 7, 20, 60])
def test_a_torn_safetensors_file_is_refused(size: int):
    data = write_tensors({"a": np.arange(5, dtype=np.int32)}, {})
    with pytest.raises(WireError):
        read_tensors(data[:size])


def test_our_safetensors_files_are_read_by_the_reference_library():
    numpy_reader = pytest.importorskip("safetensors.numpy")
    arrays = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.array([], np.int32), "c": np.array([True])}
    read = numpy_reader.load(write_tensors(arrays, {"x": "y"}))
    assert all(np.array_equal(read[name], array) for name, array in arrays.items())


def test_a_sample_with_a_short_column_says_both_lengths():
    with pytest.raises(SampleError, match="`loss_mask` has 2 entries but `tokens` has 3"):
        Sample(
            id="s",
            episode_id="e",
            group_id="g",
            prompt_id="p",
            tokens=[1, 2, 3],
            loss_mask=[False, True],
            logprobs=[0, 0, 0],
            advantage=1.0,
            loss_denominator=1,
        )
