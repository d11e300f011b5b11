"""Megatron-Core names of checkpoint tensors, as its GPT model with Transformer Engine layers gives them."""

from __future__ import annotations

from .model import ModelShape, Tensor

_TOP = {
    "model.embed_tokens.weight": "embedding.word_embeddings.weight",
    "model.norm.weight": "decoder.final_layernorm.weight",
    "lm_head.weight": "output_layer.weight",
}
_MTP = {
    "enorm.weight": "enorm.weight",
    "hnorm.weight": "hnorm.weight",
    "eh_proj.weight": "eh_proj.weight",
    "shared_head.norm.weight": "final_layernorm.weight",
}
_ATTENTION = {
    "q_proj": "linear_qkv",
    "k_proj": "linear_qkv",
    "v_proj": "linear_qkv",
    "o_proj": "linear_proj",
    "q_norm": "q_layernorm",
    "k_norm": "k_layernorm",
    "q_a_proj": "linear_q_down_proj",
    "q_b_proj": "linear_q_up_proj",
    "kv_a_proj_with_mqa": "linear_kv_down_proj",
    "kv_b_proj": "linear_kv_up_proj",
}
_MLP = {"gate_proj": "linear_fc1", "up_proj": "linear_fc1", "down_proj": "linear_fc2"}


def megatron_name(tensor: Tensor, model: ModelShape, *, first_layer: int, local_expert: int | None) -> str:
    """Name of the parameter that holds a checkpoint tensor.

    Args:
        tensor: any checkpoint tensor but a block scale.
        model: the model.
        first_layer: first layer of the rank's pipeline stage; Megatron counts from it.
        local_expert: position among the rank's experts.
    """
    if tensor.layer is None:
        return _TOP[tensor.name]
    rest = tensor.name.split(".", 3)[3]
    if tensor.layer < model.num_hidden_layers:
        prefix = f"decoder.layers.{tensor.layer - first_layer}."
    else:
        prefix = f"mtp.layers.{tensor.layer - model.num_hidden_layers}."
        if rest in _MTP:
            return prefix + _MTP[rest]
        prefix += "transformer_layer."
    return prefix + _in_layer(rest, model, is_moe=_is_moe(tensor, model), local_expert=local_expert)


def _in_layer(rest: str, model: ModelShape, *, is_moe: bool, local_expert: int | None) -> str:
    module, _, leaf = rest.rpartition(".")
    match module.split("."):
        case ["input_layernorm"]:
            return "input_layernorm.weight" if model.is_mla else "self_attention.linear_qkv.layer_norm_weight"
        case ["post_attention_layernorm"]:
            return "pre_mlp_layernorm.weight" if is_moe else "mlp.linear_fc1.layer_norm_weight"
        case ["self_attn", "q_a_layernorm"]:
            return "self_attention.linear_q_up_proj.layer_norm_weight"
        case ["self_attn", "kv_a_layernorm"]:
            return "self_attention.linear_kv_up_proj.layer_norm_weight"
        case ["self_attn", "q_proj"] if model.is_mla:
            return "self_attention.linear_q_proj.weight"
        case ["self_attn", "indexer", part]:
            return f"self_attention.core_attention.indexer.linear_{part}.{leaf}"
        case ["self_attn", part]:
            return f"self_attention.{_ATTENTION[part]}.{leaf}"
        case ["mlp", "gate"]:
            return "mlp.router.expert_bias" if leaf == "e_score_correction_bias" else "mlp.router.weight"
        case ["mlp", "experts", _, part]:
            return f"mlp.experts.{_MLP[part]}.{leaf}{local_expert}"
        case ["mlp", "shared_experts", part]:
            return f"mlp.shared_experts.{_MLP[part]}.{leaf}"
        case ["mlp", part]:
            return f"mlp.{_MLP[part]}.{leaf}"
        case _:
            raise AssertionError(f"no Megatron name for {rest}")


def _is_moe(tensor: Tensor, model: ModelShape) -> bool:
    return bool(model.num_experts) and tensor.layer is not None and tensor.layer >= model.first_moe_layer
