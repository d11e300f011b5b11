"""Packing: every row once, within the budget, the same number of micro-batches on every rank."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from miles_train import (
    BatchError,
    Layout,
    PackingError,
    RankError,
    Row,
    TrainConfig,
    batches_of,
    check_layouts,
    pack,
    plan_batch,
)
from miles_train.packing import row_cost

lengths_and_budget = st.integers(1, 200).flatmap(
    lambda budget: st.tuples(st.lists(st.integers(1, budget), max_size=60), st.just(budget))
)


@given(lengths_and_budget, st.integers(1, 5), st.integers(1, 4))
def test_every_row_is_packed_once_within_the_budget_and_ranks_stay_in_step(case, ranks, multiple_of):
    lengths, budget = case
    packed = pack(lengths, token_budget=budget, ranks=ranks, multiple_of=multiple_of)

    assert len(packed) == ranks
    assert len({len(micro_batches) for micro_batches in packed}) == 1
    assert len(packed[0]) % multiple_of == 0
    rows = [row for micro_batches in packed for micro_batch in micro_batches for row in micro_batch]
    assert sorted(rows) == list(range(len(lengths)))
    for micro_batches in packed:
        for micro_batch in micro_batches:
            assert sum(lengths[row] for row in micro_batch) <= budget
    num_bins = ranks * len(packed[0])
    num_empty = sum(not micro_batch for micro_batches in packed for micro_batch in micro_batches)
    assert num_empty == (max(0, num_bins - len(lengths)) if lengths else 0)


@given(lengths_and_budget, st.integers(1, 5))
def test_packing_the_same_rows_again_gives_the_same_result(case, ranks):
    lengths, budget = case
    assert pack(lengths, token_budget=budget, ranks=ranks) == pack(list(lengths), token_budget=budget, ranks=ranks)


@given(lengths_and_budget, st.integers(1, 3), st.integers(1, 4))
def test_a_multiple_is_reached_with_as_few_micro_batches_as_it_allows(case, ranks, multiple_of):
    lengths, budget = case
    needed = len(pack(lengths, token_budget=budget, ranks=ranks)[0])
    got = len(pack(lengths, token_budget=budget, ranks=ranks, multiple_of=multiple_of)[0])
    assert needed <= got < needed + multiple_of


@given(lengths_and_budget)
def test_micro_batches_are_nearly_as_few_as_can_be(case):
    lengths, budget = case
    (micro_batches,) = pack(lengths, token_budget=budget, ranks=1)
    at_least = -(-sum(lengths) // budget)
    assert len(micro_batches) <= 11 / 9 * max(at_least, sum(2 * n > budget for n in lengths)) + 1 or (
        len(micro_batches) < 2 * at_least
    )


def test_a_row_longer_than_the_budget_is_refused_with_the_numbers():
    with pytest.raises(PackingError, match=r"1 of 3 rows.*budget of 100.*row 1, has 101 tokens.*at least 101"):
        pack([50, 101, 7], token_budget=100, ranks=2)


def test_ten_thousand_rows_are_packed_and_balanced_in_well_under_a_second():
    lengths = np.random.default_rng(0).lognormal(6.5, 0.9, 10_000).astype(int).clip(1, 16_384).tolist()
    start = time.process_time()
    packed = pack(lengths, token_budget=16_384, ranks=8)
    assert time.process_time() - start < 1.0
    work = [sum(row_cost(lengths[row]) for rows in micro_batches for row in rows) for micro_batches in packed]
    assert max(work) < 1.02 * min(work)


def test_full_rows_are_split_evenly_even_when_the_greedy_order_runs_out_of_room():
    lengths = [6, 6, 4, 4, 5, 5]
    packed = pack(lengths, token_budget=10, ranks=1)
    assert sorted(sorted(lengths[row] for row in rows) for rows in packed[0]) == [[4, 6], [4, 6], [5, 5]]


def test_minibatches_keep_episodes_whole_and_count_their_own_totals():
    rows = [Row(f"e{i // 2}", 10 + i, 5) for i in range(8)]
    steps = plan_batch(rows, token_budget=64, ranks=2, minibatches=2)

    assert [(step.totals.num_episodes, step.totals.num_loss_tokens) for step in steps] == [(2, 20), (2, 20)]
    episodes = [{rows[r].episode_id for rank in step.ranks for micro in rank for r in micro} for step in steps]
    assert not episodes[0] & episodes[1]


def test_every_step_of_a_plan_has_a_multiple_of_micro_batches():
    rows = [Row(f"e{i}", 10 + i, 5) for i in range(7)]
    for step in plan_batch(rows, token_budget=32, ranks=2, minibatches=2, multiple_of=4):
        assert [len(micro_batches) for micro_batches in step.ranks] == [4, 4]


def test_ranks_of_one_data_rank_make_the_same_batches(sample):
    samples = [sample(f"s{i}", 9 + i) for i in range(5)]
    config = TrainConfig(ranks=4, token_budget=24)
    known = {
        "ranks": 4,
        "data_ranks": 2,
        "micro_batch_multiple": 2,
        "device": "cpu",
        "num_parameters": 1,
        "vocab_size": 67,
    }
    layouts = [Layout(rank=rank, data_rank=rank // 2, **known) for rank in range(4)]
    ids = [
        [m.sample_ids for b in batches_of(samples, config, layout=layout) for m in b.micro_batches]
        for layout in layouts
    ]
    assert ids[0] == ids[1]
    assert ids[2] == ids[3]
    assert len(ids[0]) == len(ids[2]) == 2
    names = [name for rows in (ids[0], ids[2]) for row in rows for name in row]
    assert sorted(n for n in names if n.startswith("s")) == [s.id for s in samples]


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ([(0, 2), (1, 3)], r"\[\(2, 1\), \(3, 1\)\]"),
        ([(0, 2), (0, 2)], r"are data ranks \[0\]"),
        ([(0, 1), (1, 1)], r"are data ranks \[0, 1\]"),
    ],
)
def test_layouts_under_which_rows_would_be_lost_are_refused(shares, message):
    known = {"ranks": 2, "device": "cpu", "num_parameters": 1, "vocab_size": 67}
    with pytest.raises(RankError, match=message):
        check_layouts([Layout(rank=i, data_rank=r, data_ranks=n, **known) for i, (r, n) in enumerate(shares)])


def test_rows_without_loss_tokens_are_left_out():
    rows = [Row("a", 10, 0), Row("b", 12, 4)]
    (step,) = plan_batch(rows, token_budget=64, ranks=1)
    assert step.ranks == (((1,),),)
    assert (step.totals.num_episodes, step.totals.num_loss_tokens) == (1, 4)
    with pytest.raises(BatchError, match="None of the 1 rows has a loss token"):
        plan_batch(rows[:1], token_budget=64, ranks=1)
