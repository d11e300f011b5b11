"""A micro-batch as tensors: what the model reads, and what the loss reads.

Subscripts: U distinct tokens of the packed rows, M loss tokens, R rows, L longest row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from miles_train.batch import MicroBatch

from .rows import PackedRows, packed_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInputs:
    """What a model is called with for one micro-batch: its rows, and the places whose next token is scored."""

    input_ids: Tensor
    """[1, U] int64 packed, or [R, L] right-padded."""
    position_ids: Tensor
    """As `input_ids`."""
    sources: Tensor
    """[M] int64 places in the flattened hidden states that predict the targets."""
    targets: Tensor
    """[M] int64."""
    temperatures: Tensor
    """[M] float32."""
    packed: PackedRows | None
    """None for the padded layout."""


def loss_indices(micro_batch: MicroBatch) -> np.ndarray:
    """[M] packed indices of the loss tokens."""
    return np.flatnonzero(micro_batch.loss_mask)


def model_inputs(micro_batch: MicroBatch, indices: np.ndarray, *, padded: bool, device: torch.device) -> ModelInputs:
    """Tensors for one forward pass that scores the tokens at `indices`.

    Without indices one arbitrary place is scored: every rank must run the same forward and backward pass, and its
    result is then multiplied by zero.
    """
    # sources are one left of their targets and in the same row: make_batch refuses a trained first token
    sources = indices - 1 if len(indices) else np.zeros(1, dtype=np.int64)
    scored = indices if len(indices) else sources
    packed = None
    if padded:
        grid = _grid(micro_batch)
        tokens, positions = micro_batch.tokens[grid], np.broadcast_to(np.arange(grid.shape[1]), grid.shape)
        places = micro_batch.rows_at(sources) * grid.shape[1] + micro_batch.positions[sources]
    else:
        packed = packed_rows(micro_batch.tokens, micro_batch.cu_seqlens, device)
        tokens, positions = micro_batch.tokens[None, packed.distinct], micro_batch.positions[None, packed.distinct]
        places = packed.places[sources]

    def tensor(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(device)

    return ModelInputs(
        input_ids=tensor(tokens),
        position_ids=tensor(positions),
        sources=tensor(places),
        targets=tensor(micro_batch.tokens[scored]),
        temperatures=torch.from_numpy(micro_batch.temperatures[scored]).to(device),
        packed=packed,
    )


def _grid(micro_batch: MicroBatch) -> np.ndarray:
    """[R, L] packed index of each token, padding repeats the last token of the row."""
    lengths = micro_batch.lengths[:, None]
    return micro_batch.cu_seqlens[:-1, None] + np.minimum(np.arange(lengths.max()), lengths - 1)
