"""What trainer ranks hold: FSDP2 (flat and hybrid), whole Hugging Face copies, Megatron TP x PP x EP x DP."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from ..errors import ShardError
from ..layout import Box
from .cuts import Part, cut, divided, grouped, whole
from .layout import Block, Layout, TensorLayout
from .megatron_names import megatron_name
from .model import ModelShape, Tensor


def fsdp_layout(model: ModelShape, *, ranks: int, shard_ranks: int | None = None, ranks_per_host: int = 8) -> Layout:
    """FSDP2: every tensor cut along its rows into equal chunks, the last ones shorter or empty.

    Args:
        model: what is held.
        ranks: all trainer ranks.
        shard_ranks: ranks that share one copy; fewer than `ranks` is the hybrid mesh `(replicate, shard)`.
        ranks_per_host: consecutive ranks that share a host.

    Raises:
        ShardError: the shard group does not divide the ranks.
    """
    size = shard_ranks or ranks
    divided(ranks, size, what="ranks of a hybrid mesh")
    memo: dict[tuple[object, ...], tuple[Block, ...]] = {}

    def blocks(tensor: Tensor) -> tuple[Block, ...]:
        key = tensor.shape, tensor.weight_shape
        if key not in memo:
            rows = -(-(tensor.weight_shape or tensor.shape)[0] // size)
            starts = {rank: rank % size * rows for rank in range(ranks)}
            memo[key] = grouped(
                starts, lambda r: [cut(tensor, 0, starts[r], starts[r] + rows, fp8_block=model.fp8_block)]
            )
        return memo[key]

    tensors = {t.name: TensorLayout(t.shape, t.dtype, blocks(t)) for t in model.tensors()}
    return Layout(hosts_of(ranks, ranks_per_host, "trainer"), tensors)


def full_layout(model: ModelShape, *, ranks: int = 1, ranks_per_host: int = 8) -> Layout:
    """Every rank holds every tensor whole, as a Hugging Face checkpoint on disk does."""
    everyone = tuple(range(ranks))
    tensors = {t.name: TensorLayout(t.shape, t.dtype, (Block(whole(t.shape), everyone),)) for t in model.tensors()}
    return Layout(hosts_of(ranks, ranks_per_host, "trainer"), tensors)


def hosts_of(ranks: int, ranks_per_host: int, prefix: str, first: int = 0) -> dict[int, str]:
    """Host names for consecutive ranks."""
    return {first + rank: f"{prefix}-{rank // ranks_per_host}" for rank in range(ranks)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Megatron:
    """A Megatron-Core job. Ranks are ordered tensor fastest, then context and data, pipeline slowest.

    ```
    stage 0: │ tp 0…T-1 │ tp 0…T-1 │ …        dense: T parts, replicas over the data ranks
             │ etp, then ep, then expert data  experts: ep groups of whole experts, each cut in etp
    stage 1: …
    ```
    """

    model: ModelShape
    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    dp: int = 1
    """Data x context parallel ranks: all of them hold the same dense weights."""
    layers_per_stage: tuple[int, ...] | None = None
    """None: as even as possible, the longer stages first. Draft layers belong to the last stage besides."""
    ranks_per_host: int = 8

    def __post_init__(self) -> None:
        divided(self.tp * self.dp, self.ep * self.etp, what="ranks of a pipeline stage")
        if not self.model.is_mla:
            divided(self.model.num_key_value_heads, self.tp, what="KV heads under tensor parallelism")
        if self.model.num_experts:
            divided(self.model.num_experts, self.ep, what="experts under expert parallelism")
        stages = self.stages
        if len(stages) != self.pp or sum(stages) != self.model.num_hidden_layers:
            raise ShardError(
                f"layers_per_stage {stages} has {len(stages)} stages and {sum(stages)} layers; "
                f"need {self.pp} and {self.model.num_hidden_layers}."
            )

    @property
    def ranks(self) -> int:
        return self.tp * self.dp * self.pp

    @property
    def stages(self) -> tuple[int, ...]:
        if self.layers_per_stage is not None:
            return self.layers_per_stage
        each, longer = divmod(self.model.num_hidden_layers, self.pp)
        return tuple(each + (stage < longer) for stage in range(self.pp))

    def layout(self) -> Layout:
        """The boxes of all ranks. Each is contiguous in the rank's memory; see `parts` for where.

        Raises:
            ShardError: a dimension does not divide.
        """
        memo: dict[tuple[object, ...], tuple[Block, ...]] = {}
        size = self.tp * self.dp
        tensors: dict[str, TensorLayout] = {}
        for tensor in self.model.tensors():
            stages, ep = self._stages_of(tensor), self._expert_group(tensor)
            key = tensor.role, tensor.shape, tensor.weight_shape, stages, ep
            if (blocks := memo.get(key)) is None:
                ranks = [stage * size + inner for stage in stages for inner in range(size)]
                blocks = memo[key] = grouped(ranks, lambda rank, tensor=tensor: self._boxes(tensor, rank % size))
            tensors[tensor.name] = TensorLayout(tensor.shape, tensor.dtype, blocks)
        return Layout(hosts_of(self.ranks, self.ranks_per_host, "trainer"), tensors)

    def parts(self, rank: int) -> list[Part]:
        """Where every box of a rank lies in its Megatron parameters: `linear_qkv` is interleaved by KV group (queries,
        key, value of each), `linear_fc1` holds gate above up. Block scales are left out: Megatron has none."""
        stage, inner = divmod(rank, self.tp * self.dp)
        first = sum(self.stages[:stage])
        parts: list[Part] = []
        for tensor in self.model.tensors():
            if tensor.weight_shape is None and stage in self._stages_of(tensor):
                boxes = self._boxes(tensor, inner)
                for index, box in enumerate(boxes):
                    name = megatron_name(tensor, self.model, first_layer=first, local_expert=self._local_expert(tensor))
                    rows, at = self._rows(tensor, box, index, len(boxes))
                    shape = (rows, *(stop - start for start, stop in box[1:]))
                    parts.append(Part(tensor.name, box, name, shape, (at, *(0 for _ in box[1:]))))
        return parts

    def _rows(self, tensor: Tensor, box: Box, group: int, groups: int) -> tuple[int, int]:
        """(rows of the parameter, first row of the box in it)."""
        rows, kind = box[0][1] - box[0][0], tensor.name.rsplit(".", 2)[-2]
        if tensor.role in ("q", "kv"):
            dim = self.model.head_dim
            queries = self.model.num_attention_heads // self.model.num_key_value_heads * dim
            offset = {"q_proj": 0, "k_proj": queries, "v_proj": queries + dim}[kind]
            return groups * (queries + 2 * dim), group * (queries + 2 * dim) + offset
        if kind in ("gate_proj", "up_proj"):
            return 2 * rows, rows * (kind == "up_proj")
        return rows, 0

    def _boxes(self, tensor: Tensor, inner: int) -> list[Box]:
        """Boxes of the rank at a position inside a pipeline stage."""
        ep = self._expert_group(tensor)
        if ep is not None and inner // self.etp % self.ep != ep:
            return []
        tp, index = (self.etp, inner % self.etp) if ep is not None else (self.tp, inner % self.tp)
        shape = tensor.weight_shape or tensor.shape
        match tensor.role:
            case "whole":
                return [whole(tensor.shape)]
            case "q" | "kv":
                groups = self.model.num_key_value_heads // tp
                rows = divided(shape[0], self.model.num_key_value_heads, what=tensor.name)
                starts = [(index * groups + group) * rows for group in range(groups)]
                return [self._cut(tensor, 0, start, start + rows) for start in starts]
            case "embed" | "head":
                rows = -(-shape[0] // (128 * tp)) * 128  # Megatron pads the vocabulary to a multiple of 128 x tp
                return [self._cut(tensor, 0, index * rows, (index + 1) * rows)]
            case "head_columns" | "mlp_columns" | "shared_columns" | "expert_columns":
                size = divided(shape[1], tp, what=tensor.name)
                return [self._cut(tensor, 1, index * size, (index + 1) * size)]
            case "heads" | "mlp_rows" | "shared_rows" | "expert_rows" | "mtp_rows":
                size = divided(shape[0], tp, what=tensor.name)
                return [self._cut(tensor, 0, index * size, (index + 1) * size)]

    def _cut(self, tensor: Tensor, dim: int, start: int, stop: int) -> Box:
        return cut(tensor, dim, start, stop, fp8_block=self.model.fp8_block)

    def _expert_group(self, tensor: Tensor) -> int | None:
        return None if tensor.expert is None else tensor.expert // (self.model.num_experts // self.ep)

    def _local_expert(self, tensor: Tensor) -> int | None:
        return None if tensor.expert is None else tensor.expert % (self.model.num_experts // self.ep)

    def _stages_of(self, tensor: Tensor) -> tuple[int, ...]:
        last = self.pp - 1
        if tensor.role == "embed":  # a tied output layer, and a draft layer, keep their copy in the last stage
            shared = last and (self.model.tied or self.model.num_mtp_layers)
            return (0, last) if shared else (0,)
        if tensor.layer is None or tensor.layer >= self.model.num_hidden_layers:
            return (last,)
        return (next(stage for stage, end in enumerate(accumulate(self.stages)) if tensor.layer < end),)
