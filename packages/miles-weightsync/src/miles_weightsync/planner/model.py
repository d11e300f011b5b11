"""What a model consists of: every checkpoint tensor with its shape and the role that decides how it is divided.

Names and shapes are those of Hugging Face checkpoints, experts apart (`experts.E.gate_proj`), as SGLang 0.5.23 loads
them (`models/llama.py`, `qwen2.py`, `qwen3.py`, `qwen3_moe.py`, `glm4_moe.py`, `deepseek_v2.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, cast

from ..errors import ShardError
from ..layout import Box

Role = Literal[
    "whole", "embed", "head", "q", "kv", "heads", "head_columns", "mlp_rows", "mlp_columns", "shared_rows",
    "shared_columns", "expert_rows", "expert_columns", "mtp_rows",
]  # fmt: skip
"""`q`, `kv`: rows grouped by KV head; `heads`: rows by head (MLA); `head_columns`: columns by head; `mtp_rows`: the
projection of a draft layer, whole in engines; `whole`: never divided."""

ARCHITECTURES = {
    "LlamaForCausalLM": "dense", "Qwen2ForCausalLM": "dense", "Qwen3ForCausalLM": "dense",
    "Qwen3MoeForCausalLM": "moe", "Glm4MoeForCausalLM": "moe",
    "DeepseekV3ForCausalLM": "mla", "GlmMoeDsaForCausalLM": "mla",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tensor:
    """One checkpoint tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    role: Role
    layer: int | None = None
    expert: int | None = None
    weight_shape: tuple[int, ...] | None = None
    """For block scales: shape of the weight that they belong to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes of a model, under the names of its Hugging Face config where they have one."""

    architecture: str
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tied: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    num_experts: int = 0
    moe_intermediate_size: int = 0
    first_moe_layer: int = 0
    n_shared_experts: int = 0
    correction_bias: bool = False
    q_lora_rank: int | None = None
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0
    index_n_heads: int = 0
    """Heads of the sparse-attention indexer; 0: none."""
    index_head_dim: int = 0
    num_mtp_layers: int = 0
    dtype: str = "bfloat16"
    fp8_block: int | None = None
    """Edge of the square blocks that share one float32 scale; None: weights are not quantised."""

    def __post_init__(self) -> None:
        if self.architecture not in ARCHITECTURES:
            raise ShardError(f"No layout for `{self.architecture}`; known: {', '.join(ARCHITECTURES)}.")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ShardError(
                f"{self.num_attention_heads} attention heads do not divide among {self.num_key_value_heads} KV heads."
            )

    @property
    def is_mla(self) -> bool:
        return ARCHITECTURES[self.architecture] == "mla"

    @classmethod
    def from_hf(cls, config: Mapping[str, object]) -> ModelShape:
        """Read the content of a `config.json`.

        Raises:
            ShardError: the architecture has no layout, a size is missing, or its features are not modelled.
        """
        read = _Reader(config)
        architecture = read.architecture()
        if config.get("mlp_only_layers") or read.number("decoder_sparse_step", 1) != 1:
            raise ShardError("`mlp_only_layers` and `decoder_sparse_step` other than 1 have no layout.")
        if config.get("mlp_bias") or (config.get("attention_bias") and architecture == "LlamaForCausalLM"):
            raise ShardError("Biases of `o_proj` and of the MLP have no layout.")
        if set(read.texts("indexer_types")) - {"full"}:
            raise ShardError("`indexer_types` with shared layers has no layout.")
        if config.get("quantization_config") and not read.fp8_block():
            raise ShardError("Only FP8 with square block scales has a layout among the quantised formats.")
        mla, heads = ARCHITECTURES[architecture] == "mla", read.number("num_attention_heads")
        qk_dim = read.number("qk_nope_head_dim", 0) + read.number("qk_rope_head_dim", 0)
        # transformers writes some sizes under a common name, checkpoints under the model's own.
        experts = read.first("n_routed_experts", "num_experts", "num_local_experts")
        if ARCHITECTURES[architecture] != "dense" and not experts:
            raise ShardError(f"The config of a {architecture} needs `n_routed_experts` or `num_experts`.")
        return cls(
            architecture=architecture,
            hidden_size=read.number("hidden_size"),
            num_hidden_layers=read.number("num_hidden_layers"),
            num_attention_heads=heads,
            num_key_value_heads=heads if mla else read.number("num_key_value_heads", heads),
            head_dim=qk_dim if mla else read.number("head_dim", read.number("hidden_size") // heads),
            intermediate_size=read.number("intermediate_size"),
            vocab_size=read.number("vocab_size"),
            # SGLang's Qwen3-MoE has a head of its own even where the config ties it.
            tied=bool(config.get("tie_word_embeddings", False)) and architecture != "Qwen3MoeForCausalLM",
            qkv_bias=architecture == "Qwen2ForCausalLM" or (bool(config.get("attention_bias")) and not mla),
            qk_norm=architecture.startswith("Qwen3") or bool(config.get("use_qk_norm")),
            num_experts=experts if ARCHITECTURES[architecture] != "dense" else 0,
            moe_intermediate_size=read.number("moe_intermediate_size", 0),
            first_moe_layer=read.number("first_k_dense_replace", 0),
            n_shared_experts=read.number("n_shared_experts", 0),
            correction_bias=architecture in ("Glm4MoeForCausalLM", "DeepseekV3ForCausalLM", "GlmMoeDsaForCausalLM"),
            q_lora_rank=read.number("q_lora_rank", 0) or None,
            kv_lora_rank=read.number("kv_lora_rank", 0),
            qk_nope_head_dim=read.number("qk_nope_head_dim", 0),
            qk_rope_head_dim=read.number("qk_rope_head_dim", 0),
            v_head_dim=read.number("v_head_dim", 0),
            index_n_heads=read.number("index_n_heads", 0),
            index_head_dim=read.number("index_head_dim", 0),
            num_mtp_layers=read.first("num_nextn_predict_layers", "num_mtp_layers"),
            dtype=str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch."),
            fp8_block=read.fp8_block(),
        )

    def always_float32(self) -> frozenset[str]:
        """Tensors that engines keep in float32 whatever their element type is."""
        return _float32_of(replace(self, dtype="bfloat16"))

    def tensors(self) -> Iterator[Tensor]:
        """Every checkpoint tensor in order; parts of a fused engine parameter follow one another."""
        embedding = (self.vocab_size, self.hidden_size)
        yield Tensor("model.embed_tokens.weight", embedding, self.dtype, "embed")
        for layer in range(self.num_hidden_layers):
            yield from self._layer(layer)
        yield Tensor("model.norm.weight", (self.hidden_size,), self.dtype, "whole")
        if not self.tied:
            yield Tensor("lm_head.weight", embedding, self.dtype, "head")
        for layer in range(self.num_hidden_layers, self.num_hidden_layers + self.num_mtp_layers):
            # The draft layer's own embedding and head are those of the model.
            prefix = f"model.layers.{layer}."
            yield from self._norms(layer, "enorm", "hnorm", "shared_head.norm")
            size = self.hidden_size
            yield Tensor(f"{prefix}eh_proj.weight", (size, 2 * size), self.dtype, "mtp_rows", layer)
            yield from self._layer(layer)

    def _layer(self, layer: int) -> Iterator[Tensor]:
        yield from self._norms(layer, "input_layernorm", "post_attention_layernorm")
        yield from self._latent_attention(layer) if self.is_mla else self._attention(layer)
        if not self.num_experts or layer < self.first_moe_layer:
            yield from self._mlp(layer, "mlp", self.intermediate_size, "mlp_rows", "mlp_columns")
            return
        prefix = f"model.layers.{layer}.mlp.gate"
        yield Tensor(f"{prefix}.weight", (self.num_experts, self.hidden_size), self.dtype, "whole", layer)
        if self.correction_bias:
            yield Tensor(f"{prefix}.e_score_correction_bias", (self.num_experts,), "float32", "whole", layer)
        size = self.moe_intermediate_size
        for expert in range(self.num_experts):
            yield from self._mlp(layer, f"mlp.experts.{expert}", size, "expert_rows", "expert_columns", expert)
        if self.n_shared_experts:
            size *= self.n_shared_experts
            yield from self._mlp(layer, "mlp.shared_experts", size, "shared_rows", "shared_columns")

    def _attention(self, layer: int) -> Iterator[Tensor]:
        dim, prefix = self.head_dim, f"model.layers.{layer}.self_attn."
        sizes = {"q": self.num_attention_heads * dim, "k": self.num_key_value_heads * dim}
        sizes["v"] = sizes["k"]
        for part, rows in sizes.items():
            role = "q" if part == "q" else "kv"
            yield from self._linear(f"{prefix}{part}_proj", rows, self.hidden_size, role, layer)
        if self.qkv_bias:
            for part, rows in sizes.items():
                role = "q" if part == "q" else "kv"
                yield Tensor(f"{prefix}{part}_proj.bias", (rows,), self.dtype, role, layer)
        yield from self._linear(f"{prefix}o_proj", self.hidden_size, sizes["q"], "head_columns", layer)
        if self.qk_norm:
            for part in ("q", "k"):
                yield Tensor(f"{prefix}{part}_norm.weight", (dim,), self.dtype, "whole", layer)

    def _latent_attention(self, layer: int) -> Iterator[Tensor]:
        heads, prefix, hidden = self.num_attention_heads, f"model.layers.{layer}.self_attn.", self.hidden_size
        rows = heads * (self.qk_nope_head_dim + self.qk_rope_head_dim)
        if self.q_lora_rank is None:
            yield from self._linear(f"{prefix}q_proj", rows, hidden, "heads", layer)
        else:
            yield from self._linear(f"{prefix}q_a_proj", self.q_lora_rank, hidden, "whole", layer)
        latent = self.kv_lora_rank + self.qk_rope_head_dim
        yield from self._linear(f"{prefix}kv_a_proj_with_mqa", latent, hidden, "whole", layer)
        if self.q_lora_rank is not None:
            yield Tensor(f"{prefix}q_a_layernorm.weight", (self.q_lora_rank,), self.dtype, "whole", layer)
            yield from self._linear(f"{prefix}q_b_proj", rows, self.q_lora_rank, "heads", layer)
        yield Tensor(f"{prefix}kv_a_layernorm.weight", (self.kv_lora_rank,), self.dtype, "whole", layer)
        rows = heads * (self.qk_nope_head_dim + self.v_head_dim)
        yield from self._linear(f"{prefix}kv_b_proj", rows, self.kv_lora_rank, "heads", layer)
        yield from self._linear(f"{prefix}o_proj", hidden, heads * self.v_head_dim, "head_columns", layer)
        if self.index_n_heads:
            yield from self._indexer(layer, f"{prefix}indexer.")

    def _indexer(self, layer: int, prefix: str) -> Iterator[Tensor]:
        rank, dim, heads = self.q_lora_rank or self.hidden_size, self.index_head_dim, self.index_n_heads
        yield from self._linear(f"{prefix}wq_b", heads * dim, rank, "whole", layer)
        # Never quantised here: CUDA engines keep `wk` and `weights_proj` in one unquantised parameter.
        yield Tensor(f"{prefix}wk.weight", (dim, self.hidden_size), self.dtype, "whole", layer)
        yield Tensor(f"{prefix}weights_proj.weight", (heads, self.hidden_size), self.dtype, "whole", layer)
        for part in ("weight", "bias"):
            yield Tensor(f"{prefix}k_norm.{part}", (dim,), self.dtype, "whole", layer)

    def _mlp(
        self, layer: int, name: str, size: int, rows: Role, columns: Role, expert: int | None = None
    ) -> Iterator[Tensor]:
        prefix = f"model.layers.{layer}.{name}."
        yield from self._linear(f"{prefix}gate_proj", size, self.hidden_size, rows, layer, expert)
        yield from self._linear(f"{prefix}up_proj", size, self.hidden_size, rows, layer, expert)
        yield from self._linear(f"{prefix}down_proj", self.hidden_size, size, columns, layer, expert)

    def _linear(
        self, name: str, rows: int, columns: int, role: Role, layer: int, expert: int | None = None
    ) -> Iterator[Tensor]:
        shape = (rows, columns)
        if self.fp8_block is None:
            yield Tensor(f"{name}.weight", shape, self.dtype, role, layer, expert)
            return
        yield Tensor(f"{name}.weight", shape, "float8_e4m3fn", role, layer, expert)
        blocks = tuple(-(-size // self.fp8_block) for size in shape)
        yield Tensor(f"{name}.weight_scale_inv", blocks, "float32", role, layer, expert, shape)

    def _norms(self, layer: int, *names: str) -> Iterator[Tensor]:
        for name in names:
            yield Tensor(f"model.layers.{layer}.{name}.weight", (self.hidden_size,), self.dtype, "whole", layer)


@lru_cache(maxsize=16)  # asked at every push, of models with tens of thousands of tensors
def _float32_of(model: ModelShape) -> frozenset[str]:
    return frozenset(tensor.name for tensor in model.tensors() if tensor.dtype == "float32")


def scale_box(box: Box, block: int) -> Box:
    """The block scales that go with a box of a weight: those of the blocks whose first element lies in it.

    Boxes that tile the weight give boxes that tile its scales, also where a block is cut; the owner of a cut block then
    needs the maximum over all of it.
    """
    return tuple((-(-start // block), -(-stop // block)) for start, stop in box)


class _Reader:
    def __init__(self, config: Mapping[str, object]) -> None:
        self._config = config

    def architecture(self) -> str:
        names = self.texts("architectures")
        if len(names) != 1 or names[0] not in ARCHITECTURES:
            raise ShardError(f"No layout for the architectures {names}; known: {', '.join(ARCHITECTURES)}.")
        return names[0]

    def number(self, key: str, default: int | None = None) -> int:
        value = self._config.get(key)
        if value is None:
            value = default
        if not isinstance(value, int):
            raise ShardError(f"The model config needs a whole number `{key}`, got {value!r}.")
        return value

    def first(self, *keys: str) -> int:
        """The first of several keys that is there; 0 when none is."""
        return next((self.number(key) for key in keys if self._config.get(key) is not None), 0)

    def texts(self, key: str) -> list[str]:
        value = self._config.get(key)
        return [str(item) for item in cast("list[object]", value)] if isinstance(value, list) else []

    def fp8_block(self) -> int | None:
        found = self._config.get("quantization_config")
        quantised = cast("dict[str, object]", found) if isinstance(found, dict) else {}
        edges = quantised.get("weight_block_size")
        if quantised.get("quant_method") != "fp8" or not isinstance(edges, list):
            return None
        rows, *rest = cast("list[object]", edges)
        return rows if isinstance(rows, int) and rest == [rows] else None
