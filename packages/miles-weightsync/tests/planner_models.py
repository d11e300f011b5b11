"""Small models of every family, and numpy stand-ins for both sides of a plan."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from miles_weightsync.planner import Layout, ModelShape, Plan
from miles_weightsync.planner.layout import ITEM_BYTES

DENSE = ModelShape(
    architecture="Qwen3ForCausalLM",
    hidden_size=32,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=8,
    intermediate_size=64,
    vocab_size=150,
    qk_norm=True,
)
QWEN2 = replace(DENSE, architecture="Qwen2ForCausalLM", qk_norm=False, qkv_bias=True, tied=True)
MOE = replace(DENSE, architecture="Qwen3MoeForCausalLM", num_experts=8, moe_intermediate_size=16)
GLM = replace(
    MOE,
    architecture="Glm4MoeForCausalLM",
    qkv_bias=True,
    first_moe_layer=1,
    n_shared_experts=1,
    correction_bias=True,
    num_mtp_layers=1,
)
MLA = ModelShape(
    architecture="DeepseekV3ForCausalLM",
    hidden_size=32,
    num_hidden_layers=3,
    num_attention_heads=8,
    num_key_value_heads=8,
    head_dim=6,
    intermediate_size=64,
    vocab_size=150,
    num_experts=8,
    moe_intermediate_size=16,
    first_moe_layer=1,
    n_shared_experts=1,
    correction_bias=True,
    q_lora_rank=16,
    kv_lora_rank=8,
    qk_nope_head_dim=4,
    qk_rope_head_dim=2,
    v_head_dim=4,
    num_mtp_layers=1,
)
FP8 = replace(MLA, fp8_block=2)
DSA = replace(MLA, architecture="GlmMoeDsaForCausalLM", index_n_heads=2, index_head_dim=4)
LATENT_Q = replace(MLA, q_lora_rank=None, num_mtp_layers=0)

Blocks = dict[tuple[int, str], dict[tuple[tuple[int, int], ...], np.ndarray]]
"""(rank, tensor) → box → data."""


def numbered(layout: Layout) -> dict[str, np.ndarray]:
    """Whole tensors in which every element differs."""
    tensors: dict[str, np.ndarray] = {}
    start = 1
    for name, tensor in layout.tensors.items():
        count = int(np.prod(tensor.shape))
        tensors[name] = np.arange(start, start + count).reshape(tensor.shape)
        start += count
    return tensors


def scatter(layout: Layout, tensors: dict[str, np.ndarray]) -> Blocks:
    """Give every rank its blocks."""
    blocks: Blocks = {}
    for rank, spec in layout.shards():
        index = tuple(slice(*span) for span in spec.box)
        blocks.setdefault((rank, spec.name), {})[spec.box] = np.array(tensors[spec.name][index])
    return blocks


def run(plan: Plan, source: Blocks, target: Layout) -> Blocks:
    """Carry a plan out. Each element of the target must be written exactly once."""
    blocks = {
        key: {box: np.zeros_like(data) for box, data in of_rank.items()}
        for key, of_rank in scatter(target, numbered(target)).items()
    }
    for copy in plan.copies:
        data = source[copy.src, copy.name][copy.src_block][copy.src_slices]
        place = blocks[copy.dst, copy.name][copy.dst_block][(..., *copy.dst_slices)]
        assert not place.any(), f"{copy} writes twice"
        assert copy.nbytes == data.size * ITEM_BYTES[target.tensors[copy.name].dtype]
        place[...] = data
    return blocks


def same(a: Blocks, b: Blocks) -> bool:
    """Whether two sides hold the same."""
    return a.keys() == b.keys() and all(
        a[key].keys() == b[key].keys() and all(np.array_equal(a[key][box], b[key][box]) for box in a[key]) for key in a
    )
