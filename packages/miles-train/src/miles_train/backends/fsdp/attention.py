"""Packed attention behind Transformers' attention interface."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import Tensor, nn

from miles_train.errors import UnsupportedModel
from miles_train.step.attention import attend
from miles_train.step.rows import PackedRows

ATTENTION_NAME = "miles_packed"


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    packed: PackedRows | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Transformers' attention interface: [1, heads, U, D] queries (fewer key and value heads) -> [1, U, heads, D]."""
    _refuse(module, packed, {name: kwargs.get(name) for name in ("softcap", "s_aux", "position_bias")})
    assert packed is not None, "refused above"
    assert dropout == 0.0, "dropout is turned off when a model is loaded"
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return attend(q, k, v, packed, scaling=scaling, window=sliding_window)[None], None


def _refuse(module: nn.Module, packed: PackedRows | None, extras: dict[str, object]) -> None:
    if packed is None:
        raise UnsupportedModel(
            f"{type(module).__name__} does not hand its arguments on to attention; "
            'train it with `fsdp.layout = "padded"`.'
        )
    present = sorted(name for name, value in extras.items() if value is not None)
    if present:
        raise UnsupportedModel(
            f"{type(module).__name__} uses {', '.join(present)}, which packed attention does not compute; "
            'train it with `fsdp.layout = "padded"`.'
        )


@cache
def register() -> str:
    """Make the function known to Transformers; returns its name for `attn_implementation`."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, packed_attention)
    return ATTENTION_NAME
