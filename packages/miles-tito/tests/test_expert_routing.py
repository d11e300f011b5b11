"""Routed experts: bytes and back, rows put together, shares of ranks, and what is missing."""

from __future__ import annotations

import base64
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from miles_tito import RecordError, Session, Tokenizer, WireError
from miles_tito.cli import main
from miles_tito.engine.expert_routing import (
    ExpertLayout,
    RoutedDelta,
    RoutedExperts,
    assemble,
    context_rows,
    decode_deltas,
    encode_delta,
    overlap,
    read_engine,
    smallest_unsigned,
)
from miles_tito.engine.generation import GenerateRequest, Generation, join, one_version, run_turn
from miles_tito.records import FinishReason, Sampling
from miles_tito.tokens.family_choice import choose_family
from miles_tito.tokens.merge import Joiner

QWEN3_30B = {"num_hidden_layers": 48, "num_experts": 128, "num_experts_per_tok": 8, "decoder_sparse_step": 1}
DEEPSEEK = {"num_hidden_layers": 61, "n_routed_experts": 256, "num_experts_per_tok": 8, "first_k_dense_replace": 3}


def delta(start: int, rows: int, *, seed: int = 0, layers: tuple[int, ...] = (1, 2), k: int = 2) -> RoutedDelta:
    rng = np.random.default_rng(seed)
    experts = rng.integers(0, 200, (rows, len(layers), k), dtype=np.uint8)
    return RoutedDelta(start=start, experts=experts, layers=layers, version=seed)


@pytest.mark.parametrize(
    ("config", "layers", "dtype"),
    [
        (QWEN3_30B, tuple(range(48)), np.uint8),
        (DEEPSEEK, tuple(range(3, 61)), np.uint8),
        ({**QWEN3_30B, "num_experts": 512, "mlp_only_layers": [0, 5]}, (*range(1, 5), *range(6, 48)), np.uint16),
        ({**QWEN3_30B, "decoder_sparse_step": 2}, tuple(range(1, 48, 2)), np.uint8),
        ({"text_config": {**QWEN3_30B, "moe_layer_freq": [0] + [1] * 47}}, tuple(range(1, 48)), np.uint8),
    ],
)
def test_layers_with_experts_are_read_off_the_configuration(config: Any, layers: tuple[int, ...], dtype: Any):
    layout = ExpertLayout.from_config(config)
    assert layout
    assert (layout.layers, layout.dtype) == (layers, dtype)


def test_a_dense_model_has_no_layout():
    assert ExpertLayout.from_config({"num_hidden_layers": 4}) is None


def test_experts_without_layers_are_an_error():
    with pytest.raises(RecordError, match="names 8 experts but no layers"):
        ExpertLayout.from_config({"num_experts": 8})


@pytest.mark.parametrize(
    ("largest", "dtype"), [(255, np.uint8), (256, np.uint16), (65535, np.uint16), (65536, np.uint32)]
)
def test_the_type_is_the_smallest_that_holds_every_id(largest: int, dtype: Any):
    assert smallest_unsigned(largest) == dtype


@given(
    st.lists(
        st.tuples(st.integers(0, 50), st.integers(0, 20), st.sampled_from([np.uint8, np.uint16, np.uint32])), max_size=4
    )
)
def test_deltas_survive_their_bytes(cases: list[tuple[int, int, Any]]):
    deltas = [
        RoutedDelta(start=start, experts=np.full((rows, 3, 2), rows, dtype), layers=(0, 4, 300), version=start - 1)
        for start, rows, dtype in cases
    ]
    read = decode_deltas(b"".join(map(encode_delta, deltas)))
    assert [(d.start, d.layers, d.version, d.experts.dtype) for d in read] == [
        (d.start, d.layers, d.version, d.experts.dtype) for d in deltas
    ]
    assert all(np.array_equal(a.experts, b.experts) for a, b in zip(read, deltas, strict=True))


def test_a_delta_takes_one_byte_an_expert_and_a_short_header():
    whole = encode_delta(delta(0, 1000, layers=tuple(range(48)), k=8))
    assert len(whole) <= 1000 * 48 * 8 + 256


@given(st.integers(0, 400), st.integers(0, 255))
def test_damaged_bytes_are_refused(at: int, value: int):
    data = bytearray(encode_delta(delta(3, 20)))
    at %= len(data)
    if data[at] == value:
        value ^= 1
    data[at] = value
    with pytest.raises(WireError):
        decode_deltas(bytes(data))


def test_torn_bytes_are_refused():
    data = encode_delta(delta(0, 5))
    for end in range(1, len(data)):
        with pytest.raises(WireError):
            decode_deltas(data[:end])


@given(st.lists(st.integers(0, 6), min_size=1, max_size=6))
def test_turns_give_one_row_a_token_but_for_the_last(lengths: list[int]):
    deltas = []
    start = 0
    for n, rows in enumerate(lengths):
        deltas.append(delta(start, rows, seed=n))
        start += rows
    whole = assemble(deltas, start + 1)
    if start == 0:
        assert whole is None
        return
    assert whole
    assert whole.mask.tolist() == [True] * start + [False]
    assert np.array_equal(whole.experts[:start], np.concatenate([d.experts for d in deltas]))


def test_missing_rows_are_masked_and_nothing_else():
    whole = assemble([delta(0, 3), delta(5, 2, seed=1)], 9)
    assert whole
    assert np.flatnonzero(~whole.mask).tolist() == [3, 4, 7, 8]
    assert not whole.experts[[3, 4, 7, 8]].any()


def test_the_rows_that_were_sampled_with_win_over_a_second_reading():
    first, again = delta(0, 4), delta(2, 5, seed=1)
    whole = assemble([first, again], 8)
    assert whole
    assert np.array_equal(whole.experts[:4], first.experts)
    assert np.array_equal(whole.experts[4:7], again.experts[2:])


def test_deltas_of_two_models_are_refused():
    with pytest.raises(RecordError, match=r"layers \(7,\)"):
        assemble([delta(0, 2), delta(2, 2, layers=(7,))], 5)
    with pytest.raises(RecordError, match="has 3 tokens"):
        assemble([delta(0, 4)], 3)


LAYOUT = ExpertLayout(num_layers=3, layers=(1, 2), num_experts=8, experts_per_token=2)


def payload(rows: int) -> str:
    ids = np.arange(rows * 6, dtype="<i4").reshape(rows, 3, 2) % 8
    return base64.b64encode(ids.tobytes()).decode()


def test_an_engines_payload_keeps_the_layers_with_experts_in_one_byte_each():
    read = read_engine(payload(4), LAYOUT, start=7, num_rows=4, version=3)
    assert (read.start, read.end, read.version, read.layers, read.experts.dtype) == (7, 11, 3, (1, 2), np.uint8)
    assert read.experts[0].tolist() == [[2, 3], [4, 5]]


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_a_short_payload_lacks_exactly_its_last_rows(rows: int):
    read = read_engine(payload(rows) if rows else None, LAYOUT, start=2, num_rows=4, version=0)
    whole = assemble([delta(0, 2, k=2), read], 7)
    assert whole
    assert np.flatnonzero(~whole.mask).tolist() == list(range(2 + rows, 7))


def test_a_payload_of_another_model_is_refused():
    with pytest.raises(RecordError, match="5 rows"):
        read_engine(payload(5), LAYOUT, start=0, num_rows=4, version=0)
    small = ExpertLayout(num_layers=3, layers=(1, 2), num_experts=4, experts_per_token=2)
    with pytest.raises(RecordError, match="experts 0 to 7 of 4"):
        read_engine(payload(4), small, start=0, num_rows=4, version=0)


@pytest.mark.parametrize("zigzag", [True, False])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_part_the_tokens_among_them(size: int, zigzag: bool):
    parts = [context_rows(16, rank=rank, size=size, zigzag=zigzag) for rank in range(size)]
    assert sorted(np.concatenate(parts).tolist()) == list(range(16))
    assert {len(part) for part in parts} == {16 // size}
    if zigzag and size == 2:
        assert parts[0].tolist() == [0, 1, 2, 3, 12, 13, 14, 15]


def test_a_rank_takes_its_rows_and_its_layers():
    whole = assemble([delta(0, 7, layers=(1, 2, 5))], 8)
    assert whole
    share = whole.take(rows=context_rows(8, rank=1, size=2), layers=[0, 2, 5])
    assert share.layers == (2, 5)
    assert np.array_equal(share.experts, whole.experts[[2, 3, 4, 5]][:, [1, 2]])
    assert share.mask.tolist() == [True] * 4


def test_tokens_that_do_not_part_are_refused():
    with pytest.raises(RecordError, match="10 tokens do not part"):
        context_rows(10, rank=0, size=4)


def test_overlap_counts_equal_sets_whatever_their_order():
    whole = assemble([delta(0, 6)], 7)
    assert whole
    swapped = RoutedExperts(experts=whole.experts[:, :, ::-1], mask=whole.mask, layers=whole.layers)
    assert overlap(whole, swapped).tolist() == [1.0, 1.0]
    other = whole.experts.copy()
    other[0, 1] = 255
    assert overlap(whole, RoutedExperts(experts=other, mask=whole.mask, layers=whole.layers)).tolist() == [1.0, 5 / 6]


class RoutingEngine:
    """Samples the budget, one token id a position, and reports experts; `answers` says how each call ends."""

    def __init__(self, answers: list[tuple[int, FinishReason, int]]) -> None:
        """`answers`: tokens sampled, the finish reason, and how many of the rows are lacking."""
        self.answers = answers
        self.asked: list[tuple[int, int]] = []
        """Length of the prompt and first row of each call."""

    async def generate(self, request: GenerateRequest) -> Generation:
        sampled, finish, lacking = self.answers[len(self.asked)]
        prompt, start = len(request.input_ids), request.routed_from
        self.asked.append((prompt, start))
        rows = prompt + sampled - 1 - start - lacking
        experts = np.arange(start, start + rows).reshape(-1, 1, 1).astype(np.uint8)
        told = RoutedDelta(start=start, experts=experts, layers=(0,), version=len(self.asked))
        return Generation(
            output_ids=np.full(sampled, 7, np.int32),
            logprobs=np.full(sampled, -1.0, np.float32),
            versions=one_version(sampled, len(self.asked)),
            finish_reason=finish,
            routed=(told,) if rows > 0 else (),
        )

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[Generation, None]:
        yield await self.generate(request)

    async def abort(self, rid: str) -> None: ...

    async def aclose(self) -> None: ...


def request_of(prompt: int, routed_from: int = 0) -> GenerateRequest:
    return GenerateRequest(
        rid="r",
        session_id="s",
        input_ids=np.arange(prompt, dtype=np.int32),
        sampling=Sampling(),
        max_new_tokens=9,
        routed_from=routed_from,
    )


async def test_an_interrupted_turn_asks_for_the_rows_it_lacks():
    """Three tokens and their rows, then an abort in the queue, then the rest."""
    engine = RoutingEngine([(3, FinishReason.ABORT, 0), (0, FinishReason.ABORT, 99), (6, FinishReason.LENGTH, 0)])
    pieces = [piece async for piece in run_turn(engine, request_of(5), stream=False)]
    whole = assemble(join(pieces).routed, 14)
    assert engine.asked == [(5, 0), (8, 7), (8, 7)]
    assert whole
    assert whole.mask.tolist() == [True] * 13 + [False]
    assert whole.experts[:13, 0, 0].tolist() == list(range(13))


async def test_a_session_carries_rows_from_turn_to_turn(tokenizer: Tokenizer):
    engine = RoutingEngine([(4, FinishReason.STOP, 0), (2, FinishReason.STOP, 3), (5, FinishReason.STOP, 0)])
    session = Session("s", Joiner(tokenizer, choose_family("tiny", tokenizer)), max_context=4096)
    messages: list[dict[str, Any]] = []
    ends: list[int] = []
    for number in range(3):
        messages.append({"role": "user", "content": f"question {number}"})
        plan = session.plan(messages)
        turn = session.begin(plan, session.encode(plan), rid=f"r{number}")
        whole = join([piece async for piece in run_turn(engine, turn.request, stream=False)])
        turn.reader.feed(whole.output_ids)
        turn.reader.finish()
        node = session.commit(turn, whole)
        ends.append(node.num_ids)
        messages.append(node.message)
    assert [start for _, start in engine.asked] == [0, ends[0] - 1, ends[1] - 1]
    (trajectory,) = session.trajectories()
    assert trajectory.routed_experts is not None
    assert trajectory.routed_mask is not None
    lacking = np.flatnonzero(~trajectory.routed_mask)
    assert lacking.tolist() == [ends[1] - 4, ends[1] - 3, ends[1] - 2, ends[2] - 1]
    told = np.flatnonzero(trajectory.routed_mask)
    assert trajectory.routed_experts[told, 0, 0].tolist() == (told % 256).tolist()


def test_experts_of_a_dense_model_cannot_be_recorded(
    tmp_path: Path, write_tokenizer: Any, capsys: pytest.CaptureFixture[str]
):
    folder = write_tokenizer(tmp_path)
    asked = ["serve", "--engine", "http://127.0.0.1:1", "--tokenizer", str(folder), "--routed-experts"]
    assert main(asked) == 1
    assert "no `config.json` to read the experts' layers from" in capsys.readouterr().err
    (folder / "config.json").write_text('{"num_hidden_layers": 2, "max_position_embeddings": 64}')
    assert main(asked) == 1
    assert "has no experts by its config.json" in capsys.readouterr().err
