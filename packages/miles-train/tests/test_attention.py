"""Packed attention equals attention row by row, whichever kernel runs it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from miles_train import UnsupportedModel
from miles_train.backends.fsdp.attention import packed_attention
from miles_train.step.rows import PackedRows, packed_rows
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

HEADS, KV_HEADS, D = 4, 2, 8
ROWS = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 9], [7], [1, 2, 3, 4, 8, 8, 8]]


def packed() -> PackedRows:
    tokens = np.concatenate([np.array(row, dtype=np.int32) for row in ROWS])
    return packed_rows(tokens, np.cumsum([0, *map(len, ROWS)]).astype(np.int32), torch.device("cpu"))


def qkv(rows: PackedRows) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    size = len(rows.distinct)
    return tuple(torch.randn(1, heads, size, D, requires_grad=True) for heads in (HEADS, KV_HEADS, KV_HEADS))


def row_by_row(q: Tensor, k: Tensor, v: Tensor, rows: PackedRows, window: int | None) -> Tensor:
    out = torch.zeros(q.shape[2], HEADS, D)
    start = 0
    for row in ROWS:
        places = torch.from_numpy(rows.places[start : start + len(row)])
        distance = torch.arange(len(row))[:, None] - torch.arange(len(row))
        mask = (distance >= 0) & (distance < (window or 99))
        got = scaled_dot_product_attention(
            *(x[:, :, places] for x in (q, k, v)), attn_mask=mask, scale=0.3, enable_gqa=True
        )
        out = out.index_copy(0, places, got[0].transpose(0, 1))
        start += len(row)
    return out[None]


@pytest.mark.parametrize("window", [None, 3])
def test_rows_see_themselves_only_and_gradients_of_shared_prefixes_add_up(window):
    rows = packed()
    q, k, v = qkv(rows)
    module = torch.nn.Module()
    got, _ = packed_attention(module, q, k, v, None, scaling=0.3, sliding_window=window, packed=rows)
    wanted = row_by_row(q, k, v, rows, window)
    torch.testing.assert_close(got, wanted)
    mix = torch.randn_like(got)
    for a, b in zip(
        torch.autograd.grad((got * mix).sum(), (q, k, v)),
        torch.autograd.grad((wanted * mix).sum(), (q, k, v)),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("window", [None, 3])
def test_the_variable_length_kernel_is_given_whole_rows(window, monkeypatch):
    """The kernel runs on GPUs only; here a loop stands in for it."""
    from miles_train.step import attention
    from torch.nn.attention import varlen

    def loop(q, k, v, cu_q, cu_k, max_q, max_k, *, scale, window_size, enable_gqa):
        assert torch.equal(cu_q, cu_k)
        assert cu_q.dtype == torch.int32
        assert max_q == max_k == 7
        parts = []
        for start, stop in zip(cu_q[:-1].tolist(), cu_q[1:].tolist(), strict=True):
            distance = torch.arange(stop - start)[:, None] - torch.arange(stop - start)
            left, right = window_size
            mask = (distance >= -right) & (distance <= (left if left >= 0 else 99))
            rows = (x[start:stop].transpose(0, 1)[None] for x in (q, k, v))
            out = scaled_dot_product_attention(*rows, attn_mask=mask, scale=scale, enable_gqa=enable_gqa)
            parts.append(out[0].transpose(0, 1))
        return torch.cat(parts)

    monkeypatch.setattr(varlen, "varlen_attn", loop)
    rows = packed()
    q, k, v = (x[0].transpose(0, 1) for x in qkv(rows))
    torch.testing.assert_close(
        attention.varlen(q, k, v, rows, scaling=0.3, window=window),
        attention.bucketed(q, k, v, rows, scaling=0.3, window=window),
    )


def test_attention_that_would_be_computed_wrongly_is_refused():
    rows = packed()
    q, k, v = qkv(rows)
    module = torch.nn.Module()
    with pytest.raises(UnsupportedModel, match="uses s_aux"):
        packed_attention(module, q, k, v, None, packed=rows, s_aux=torch.zeros(4))
    with pytest.raises(UnsupportedModel, match='layout = "padded"'):
        packed_attention(module, q, k, v, None)
