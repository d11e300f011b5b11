"""Known models at the rank counts that they are trained and served with.

Shapes are those of the published Hugging Face configs: `Qwen/Qwen3-235B-A22B`, `deepseek-ai/DeepSeek-V3`,
`moonshotai/Kimi-K2-Instruct`, `zai-org/GLM-5` (the second and the last are also the defaults of transformers'
`DeepseekV3Config` and `GlmMoeDsaConfig`). The DeepSeek and Kimi checkpoints are FP8 with 128 x 128 block scales.
Pipeline stages are cut so that every stage has about the same number of MoE layers: a longer stage sends more per rank
whatever a planner does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from .layout import Layout
from .model import ModelShape
from .sglang import SGLang
from .trainer import Megatron

QWEN3_235B_A22B = ModelShape(
    architecture="Qwen3MoeForCausalLM",
    hidden_size=4096,
    num_hidden_layers=94,
    num_attention_heads=64,
    num_key_value_heads=4,
    head_dim=128,
    intermediate_size=12288,
    vocab_size=151936,
    qk_norm=True,
    num_experts=128,
    moe_intermediate_size=1536,
)
DEEPSEEK_V3 = ModelShape(
    architecture="DeepseekV3ForCausalLM",
    hidden_size=7168,
    num_hidden_layers=61,
    num_attention_heads=128,
    num_key_value_heads=128,
    head_dim=192,
    intermediate_size=18432,
    vocab_size=129280,
    num_experts=256,
    moe_intermediate_size=2048,
    first_moe_layer=3,
    n_shared_experts=1,
    correction_bias=True,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    num_mtp_layers=1,
    fp8_block=128,
)
KIMI_K2 = replace(
    DEEPSEEK_V3,
    num_attention_heads=64,
    num_key_value_heads=64,
    vocab_size=163840,
    num_experts=384,
    first_moe_layer=1,
    num_mtp_layers=0,
)
GLM_5 = ModelShape(
    architecture="GlmMoeDsaForCausalLM",
    hidden_size=6144,
    num_hidden_layers=78,
    num_attention_heads=64,
    num_key_value_heads=64,
    head_dim=256,
    intermediate_size=12288,
    vocab_size=154880,
    num_experts=256,
    moe_intermediate_size=2048,
    first_moe_layer=3,
    n_shared_experts=1,
    correction_bias=True,
    q_lora_rank=2048,
    kv_lora_rank=512,
    qk_nope_head_dim=192,
    qk_rope_head_dim=64,
    v_head_dim=256,
    index_n_heads=32,
    index_head_dim=128,
    num_mtp_layers=1,
)


@dataclass(frozen=True, slots=True)
class Preset:
    """A trainer and the engines that it feeds."""

    trainer: Megatron
    engines: SGLang
    about: str

    def layouts(self) -> tuple[Layout, Layout]:
        """(source, target)."""
        return self.trainer.layout(), self.engines.layout()


def _qwen3_235b_a22b() -> Preset:
    return Preset(
        Megatron(model=QWEN3_235B_A22B, tp=4, pp=4, ep=16, dp=4),
        SGLang(model=QWEN3_235B_A22B, engines=2, tp=32, ep=32),
        "bf16; 64 ranks TP4 PP4 EP16 → 2 engines of TP32 EP32",
    )


def _deepseek_v3() -> Preset:
    return Preset(
        Megatron(model=DEEPSEEK_V3, tp=8, pp=4, ep=32, dp=4, layers_per_stage=(17, 15, 15, 14)),
        SGLang(
            model=DEEPSEEK_V3, engines=8, tp=16, dp=4, ep=16, dp_lm_head=True, replicate_shared_experts=True, draft=True
        ),
        "FP8; 128 ranks TP8 PP4 EP32 → 8 engines of TP16 EP16, DP4 attention, MTP draft",
    )  # fmt: skip


def _kimi_k2() -> Preset:
    return Preset(
        Megatron(model=KIMI_K2, tp=8, pp=4, ep=64, dp=8, layers_per_stage=(16, 15, 15, 15)),
        SGLang(model=KIMI_K2, engines=16, tp=16, ep=16),
        "FP8; 256 ranks TP8 PP4 EP64 → 16 engines of TP16 EP16",
    )


def _glm_5() -> Preset:
    return Preset(
        Megatron(model=GLM_5, tp=4, pp=4, ep=32, dp=8, layers_per_stage=(22, 19, 19, 18)),
        SGLang(model=GLM_5, engines=8, tp=16, ep=16, draft=True),
        "bf16; 128 ranks TP4 PP4 EP32 → 8 engines of TP16 EP16, MTP draft",
    )


PRESETS: dict[str, Callable[[], Preset]] = {
    "qwen3-235b-a22b": _qwen3_235b_a22b,
    "deepseek-v3": _deepseek_v3,
    "kimi-k2": _kimi_k2,
    "glm-5": _glm_5,
}
