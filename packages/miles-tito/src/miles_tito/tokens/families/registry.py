"""Families by name."""

from __future__ import annotations

from . import (
    deepseek_v3,
    deepseek_v4,
    deepseek_v32,
    gemma_3,
    glm,
    gpt_oss,
    inkling,
    kimi_k2,
    llama_3_1,
    minimax_m2,
    mistral,
    nemotron_3,
    qwen3,
    qwen3_5,
    smollm2,
    tiny,
)
from .base import Family

_MODULES = (
    *(deepseek_v3, deepseek_v32, deepseek_v4, gemma_3, glm, gpt_oss, inkling, kimi_k2, llama_3_1, minimax_m2),
    *(mistral, nemotron_3, qwen3, qwen3_5, smollm2, tiny),
)
FAMILIES: dict[str, Family] = {module.FAMILY.name: module.FAMILY for module in _MODULES}
ALIASES = {
    **dict.fromkeys(("qwen3-thinking", "qwen3-next", "qwen3-vl"), "qwen3"),
    **dict.fromkeys(("qwen3.6", "qwen3-coder"), "qwen3.5"),
    "chatml": "smollm2",
    **dict.fromkeys(("deepseek-r1", "deepseek-v3.1"), "deepseek-v3"),
    **dict.fromkeys(("glm-4.5", "glm-4.6", "glm-4.7", "glm-5"), "glm"),
    **dict.fromkeys(("kimi-k2-thinking", "kimi-k2.5", "kimi-k2.6"), "kimi-k2"),
    **dict.fromkeys(("minimax-m2.5", "minimax-m2.7"), "minimax-m2"),
    **dict.fromkeys(("llama-3.2", "llama-3.3"), "llama-3.1"),
}
"""Models that are written like another family."""
