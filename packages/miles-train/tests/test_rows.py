"""Rows are mapped to distinct prefixes and back without loss."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from miles_train.step.rows import packed_rows

rows_of_few_tokens = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=12)


@given(rows_of_few_tokens)
def test_each_distinct_prefix_is_computed_once_and_every_row_is_found_again(rows):
    tokens = np.concatenate([np.array(row, dtype=np.int32) for row in rows])
    cu_seqlens = np.cumsum([0, *map(len, rows)]).astype(np.int32)
    packed = packed_rows(tokens, cu_seqlens, torch.device("cpu"))

    prefixes = [tuple(row[: i + 1]) for row in rows for i in range(len(row))]
    assert len(packed.distinct) == len(set(prefixes))
    for place, prefix in zip(packed.places, prefixes, strict=True):
        assert prefixes[packed.distinct[place]] == prefix


@given(rows_of_few_tokens)
def test_buckets_hold_every_row_whole_and_give_each_distinct_token_back(rows):
    tokens = np.concatenate([np.array(row, dtype=np.int32) for row in rows])
    cu_seqlens = np.cumsum([0, *map(len, rows)]).astype(np.int32)
    packed = packed_rows(tokens, cu_seqlens, torch.device("cpu"))

    flat = torch.cat([bucket.reshape(-1) for bucket in packed.buckets])
    assert torch.equal(flat[packed.from_buckets], torch.arange(len(packed.distinct)))
    inside = sorted(
        tuple(tokens[packed.distinct[row]][:length].tolist())
        for bucket in packed.buckets
        for row, length in zip(bucket.numpy(), _lengths(bucket.numpy()), strict=True)
    )
    assert inside == sorted(map(tuple, rows))


def test_rows_of_very_different_length_do_not_share_a_bucket():
    lengths = [600, 580, 100, 90, 80]
    tokens = np.random.default_rng(0).integers(0, 1000, sum(lengths)).astype(np.int32)
    packed = packed_rows(tokens, np.cumsum([0, *lengths]).astype(np.int32), torch.device("cpu"))
    assert [tuple(bucket.shape) for bucket in packed.buckets] == [(2, 600), (3, 100)]


def _lengths(bucket: np.ndarray) -> list[int]:
    """Padding repeats the last place, and no place occurs twice in a row."""
    return [len(dict.fromkeys(row.tolist())) for row in bucket]
