"""What the ranks of SGLang engines need, and where it lies in their parameters.

Read in SGLang 0.5.23 (`srt/`): `layers/linear.py` (column-parallel layers keep rows, row-parallel ones columns; KV
heads are replicated when there are more ranks than heads), `layers/vocab_parallel_embedding.py` (rows padded to 64, or
64 x ranks), `layers/moe/fused_moe_triton/layer.py` (`w13` stacks gate above up for each expert; ranks are
expert-parallel group x tensor-parallel rank inside it; a fused shared expert is one more slot on every rank),
`models/qwen3_moe.py`, `glm4_moe.py`, `deepseek_v2.py`, `deepseek_common/deepseek_weight_loader.py` (`q_a` and `kv_a`
fused along rows), `deepseek_nextn.py` (draft layer), `runtime_context.py` (rank arithmetic),
`configs/update_config.py` (CPU padding).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ..errors import ShardError
from ..layout import Box, volume
from .cuts import Part, cut, divided, grouped, padded, whole
from .layout import Block, Layout, TensorLayout
from .model import ModelShape, Tensor
from .trainer import hosts_of

_VOCAB_PADDING = 64
_CPU_MLP_PADDING = 32
_NO_DP_ATTENTION = ("LlamaForCausalLM", "Qwen2ForCausalLM")
_FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
    "q_a_proj": "fused_qkv_a_proj_with_mqa",
    "kv_a_proj_with_mqa": "fused_qkv_a_proj_with_mqa",
    "wk": "wk_weights_proj",
    "weights_proj": "wk_weights_proj",
}
_EXPERT = {"gate_proj": "w13", "up_proj": "w13", "down_proj": "w2"}
NOT_FROM_CHECKPOINTS = (".k_scale", ".v_scale")
"""Ends of the names of live parameters that no checkpoint tensor fills."""
_DRAFT_TOP = ("enorm.", "hnorm.", "eh_proj.", "shared_head.norm.")


@dataclass(frozen=True, slots=True, kw_only=True)
class SGLang:
    """Equal SGLang engines; rank `e * tp + t` is tensor-parallel rank t of engine e."""

    model: ModelShape
    engines: int = 1
    tp: int = 1
    dp: int = 1
    """`--dp-size` with `--enable-dp-attention`: attention is divided among tp / dp ranks only."""
    ep: int = 1
    """`--ep-size`: each group of tp / ep ranks has its own experts and divides each among its ranks."""
    dp_lm_head: bool = False
    """`--enable-dp-lm-head`: the head is divided as attention is."""
    replicate_dense_mlp: bool = False
    """`--moe-dense-tp-size 1`: dense MLP layers of MoE models are whole on every rank."""
    replicate_shared_experts: bool = False
    """True for expert all-to-all backends such as DeepEP, where shared experts are whole on every rank."""
    fuse_shared_experts: bool = False
    """The shared expert is one more slot of `w13` and `w2` on every rank (SGLang's fusion optimisation)."""
    draft: bool = False
    """The engine runs the model's MTP layer as its draft model."""
    on_gpu: bool = True
    """On a CPU the MLP is padded and the indexer is not fused."""
    ranks_per_host: int = 8

    def __post_init__(self) -> None:
        model = self.model
        divided(self.tp, self.dp, what="ranks under data-parallel attention")
        divided(self.tp, self.ep, what="ranks under expert parallelism")
        divided(model.num_attention_heads, self.attention_ranks, what="attention heads")
        if self.dp > 1 and model.architecture in _NO_DP_ATTENTION:
            raise ShardError(f"SGLang has no data-parallel attention for {model.architecture}; use dp = 1.")
        if not model.is_mla and model.num_key_value_heads < self.attention_ranks:
            divided(self.attention_ranks, model.num_key_value_heads, what="attention ranks among KV heads")
        if model.num_experts:
            divided(model.num_experts, self.ep, what="experts under expert parallelism")
        elif self.ep > 1:
            raise ShardError(f"ep = {self.ep} has no effect: {model.architecture} has no experts.")
        if self.draft and model.num_mtp_layers != 1:
            raise ShardError(f"A draft model needs exactly one MTP layer; this model has {model.num_mtp_layers}.")
        if self.fuse_shared_experts and (model.n_shared_experts != 1 or self.replicate_shared_experts):
            raise ShardError("Only one shared expert can be fused, and not with `replicate_shared_experts`.")
        if not self.on_gpu and model.fp8_block:
            raise ShardError("Engines on a CPU have no layout for FP8 block scales.")

    @classmethod
    def from_server_info(
        cls, info: Mapping[str, object], *, model: ModelShape, engines: int = 1, fuse_shared_experts: bool = False
    ) -> SGLang:
        """Read how engines were started from what `/server_info` of one of them answers.

        Args:
            info: the answer.
            model: its model.
            engines: servers started alike.
            fuse_shared_experts: whether SGLang fused the shared expert, which the answer does not tell; `w13_weight`
                then has one slot more than there are local experts.

        Raises:
            ShardError: the engines divide their model in a way that has no layout.
        """

        def number(key: str) -> int:
            value = info.get(key)
            return value if isinstance(value, int) else 1

        for key in ("pp_size", "moe_dp_size", "attn_cp_size"):
            if number(key) > 1:
                raise ShardError(f"Engines with {key} = {number(key)} have no layout.")
        if info.get("ep_num_redundant_experts") or info.get("enable_eplb"):
            raise ShardError("Engines with redundant or rebalanced experts have no layout.")
        spreads_attention = bool(info.get("enable_dp_attention"))
        drafts_with_itself = info.get("speculative_draft_model_path") in (None, info.get("model_path"))
        return cls(
            model=model,
            engines=engines if spreads_attention else engines * number("dp_size"),
            tp=number("tp_size"),
            dp=number("dp_size") if spreads_attention else 1,
            ep=number("ep_size"),
            dp_lm_head=bool(info.get("enable_dp_lm_head")),
            replicate_dense_mlp=info.get("moe_dense_tp_size") == 1,
            replicate_shared_experts=info.get("moe_a2a_backend") not in (None, "none"),
            fuse_shared_experts=fuse_shared_experts,
            draft=info.get("speculative_algorithm") in ("EAGLE", "NEXTN") and drafts_with_itself,
            on_gpu=info.get("device") != "cpu",
        )

    @property
    def attention_ranks(self) -> int:
        return self.tp // self.dp

    @property
    def ranks(self) -> int:
        return self.engines * self.tp

    def tensors(self) -> Iterator[Tensor]:
        """The checkpoint tensors that these engines load."""
        for tensor in self.model.tensors():
            if self.draft or tensor.layer is None or tensor.layer < self.model.num_hidden_layers:
                yield tensor

    def layout(self) -> Layout:
        """The boxes that all ranks need; padding is not among them.

        Raises:
            ShardError: a dimension does not divide, or a cut goes through an FP8 block.
        """
        memo: dict[tuple[object, ...], tuple[Block, ...]] = {}
        tensors: dict[str, TensorLayout] = {}
        for tensor in self.tensors():
            key = tensor.role, tensor.shape, tensor.weight_shape, self._expert_group(tensor)
            if (blocks := memo.get(key)) is None:
                of_engine = grouped(range(self.tp), lambda t, tensor=tensor: self._boxes(tensor, t))
                blocks = memo[key] = tuple(Block(box, self._in_all(ranks)) for box, ranks in of_engine)
            tensors[tensor.name] = TensorLayout(tensor.shape, tensor.dtype, blocks)
        return Layout(hosts_of(self.ranks, self.ranks_per_host, "engine"), tensors)

    def parts(self, rank: int) -> list[Part]:
        """Where every box of a rank lies in the parameters of its model, as they are right after loading."""
        shapes, placed = self._placed(rank)
        return [
            Part(tensor.name, box, param, shapes[model, param], start, model)
            for tensor, box, model, param, start in placed
            if volume(box)
        ]

    def params(self, rank: int) -> dict[str, tuple[int, ...]]:
        """Shape of each parameter of a rank's target model, those that hold nothing but padding included."""
        return {param: shape for (model, param), shape in self._placed(rank)[0].items() if model == "target"}

    def _placed(
        self, rank: int
    ) -> tuple[dict[tuple[str, str], tuple[int, ...]], list[tuple[Tensor, Box, str, str, tuple[int, ...]]]]:
        """Shapes of all parameters by (model, parameter); and (tensor, box, model, parameter, start) of every box."""
        rows: dict[tuple[str, str, int | None], int] = {}  # expert slots repeat the same rows: each counts its own
        shapes: dict[tuple[str, str], tuple[int, ...]] = {}
        placed: list[tuple[Tensor, Box, str, str, tuple[int, ...]]] = []
        for tensor in self.tensors():
            for box in self._boxes(tensor, rank % self.tp):
                model, param, slot = self._param(tensor)
                local, at = self._local_shape(tensor), rows.get((model, param, slot), 0)
                rows[model, param, slot] = at + local[0]
                shape, start = (at + local[0], *local[1:]), (at, *(0 for _ in box[1:]))
                if slot is not None:
                    shape, start = (self._slots, *shape), (slot, *start)
                shapes[model, param] = max(shape, shapes.get((model, param), shape))
                placed.append((tensor, box, model, param, start))
        return shapes, placed

    @property
    def _slots(self) -> int:
        return self.model.num_experts // self.ep + self.fuse_shared_experts

    def _in_all(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(engine * self.tp + rank for engine in range(self.engines) for rank in ranks)

    def _expert_group(self, tensor: Tensor) -> int | None:
        return None if tensor.expert is None else tensor.expert // (self.model.num_experts // self.ep)

    def _boxes(self, tensor: Tensor, rank: int) -> list[Box]:
        """The box of one rank of an engine; none when the expert is another group's."""
        group = self._expert_group(tensor)
        if group is not None and rank // (self.tp // self.ep) != group:
            return []
        dim, parts, size = self._division(tensor)
        if dim is None:
            return [whole(tensor.shape)]
        index = rank % self._group_ranks(tensor) * parts // self._group_ranks(tensor)
        return [cut(tensor, dim, index * size, (index + 1) * size, fp8_block=self.model.fp8_block)]

    def _group_ranks(self, tensor: Tensor) -> int:
        """Consecutive ranks that divide a tensor among themselves."""
        match tensor.role:
            case "whole" | "mtp_rows":
                return 1
            case "q" | "kv" | "heads" | "head_columns":
                return self.attention_ranks
            case "embed":
                return self.attention_ranks
            case "head":
                return self.attention_ranks if self.dp_lm_head else self.tp
            case "mlp_rows" | "mlp_columns":
                return 1 if self.replicate_dense_mlp else self.tp
            case "shared_rows" | "shared_columns":
                if self.fuse_shared_experts:
                    return self.tp // self.ep
                return 1 if self.replicate_shared_experts else self.tp
            case "expert_rows" | "expert_columns":
                return self.tp // self.ep

    def _division(self, tensor: Tensor) -> tuple[int | None, int, int]:
        """(divided dimension, parts, size of each part, padding included), in elements of the weight."""
        ranks = self._group_ranks(tensor)
        if tensor.role in ("whole", "mtp_rows"):
            return None, 1, 0
        dim = 1 if tensor.role.endswith("columns") else 0
        length = (tensor.weight_shape or tensor.shape)[dim]
        if tensor.role == "kv":
            ranks = min(ranks, self.model.num_key_value_heads)
        elif tensor.role in ("embed", "head"):
            length = padded(length, _VOCAB_PADDING * (1 if padded(length, _VOCAB_PADDING) % ranks == 0 else ranks))
        elif not self.on_gpu and tensor.role != "q" and not tensor.role.startswith("head"):
            stacked = self.model.n_shared_experts if tensor.role.startswith("shared") else 1
            length = stacked * padded(length // stacked, _CPU_MLP_PADDING * self.tp)
        size = divided(length, ranks, what=tensor.name)
        block = self.model.fp8_block
        if block and ranks > 1 and size % block and (tensor.weight_shape or tensor.dtype == "float8_e4m3fn"):
            raise ShardError(f"`{tensor.name}`: {ranks} parts of {size} cut through FP8 blocks of {block}.")
        return dim, ranks, size

    def _local_shape(self, tensor: Tensor) -> tuple[int, ...]:
        dim, _, size = self._division(tensor)
        if dim is None:
            return tensor.shape
        if tensor.weight_shape and self.model.fp8_block:
            size = -(-size // self.model.fp8_block)
        return (*tensor.shape[:dim], size, *tensor.shape[dim + 1 :])

    def _param(self, tensor: Tensor) -> tuple[str, str, int | None]:
        """(model, parameter, slot among stacked experts)."""
        model, name = "target", tensor.name
        if tensor.layer is not None and tensor.layer >= self.model.num_hidden_layers:
            prefix, rest = f"model.layers.{tensor.layer}.", name.split(".", 3)[3]
            top = rest.startswith(_DRAFT_TOP)
            model, name = "draft", name.replace(prefix, "model." if top else "model.decoder.")
        path, leaf = name.rsplit(".", 1)
        module, _, part = path.rpartition(".")
        if tensor.expert is not None:
            slot = tensor.expert % (self.model.num_experts // self.ep)
            return model, f"{module.rsplit('.', 1)[0]}.{_EXPERT[part]}_{leaf}", slot
        if tensor.role.startswith("shared") and self.fuse_shared_experts:
            return model, f"{module.removesuffix('shared_experts')}experts.{_EXPERT[part]}_{leaf}", self._slots - 1
        return model, f"{path.removesuffix(part)}{self._fused(tensor, part)}.{leaf}", None

    def _fused(self, tensor: Tensor, part: str) -> str:
        if part in ("q_proj", "kv_a_proj_with_mqa") and self.model.is_mla and self.model.q_lora_rank is None:
            return part
        if part in ("wk", "weights_proj") and not self.on_gpu:
            return part
        return _FUSED.get(part, part) if tensor.role != "head_columns" else part
