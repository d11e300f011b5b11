"""Which tensors are quantised, and how: one matcher for checkpoint, training, weight updates and checks.

Needs no torch, so that a configuration can hold a recipe. Names are those of Hugging Face checkpoints.
"""

from __future__ import annotations

import itertools
import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ..errors import QuantError
from ..formats.names import parse_name

if TYPE_CHECKING:
    from ..formats.spec import Format

ALWAYS_KEPT = (
    "norm",
    "embed",
    "lm_head",
    ".gate.",
    "router",
    "shared_expert_gate",
    "eh_proj",
    "mtp.fc",
    "indexer.weights_proj",
    "visual.",
    "vision",
)
"""Substrings of names that stay as they are: norms, embeddings, head, routers, what joins a multi-token-prediction
layer to the model, the weights of a sparse-attention indexer, and vision towers."""

EXPERTS = (".experts.",)
"""The only names that NVFP4 quantises where `only` is unset: routed experts."""

FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
)
"""Projections that engines load as one matrix: quantised together or not at all, with one largest value where the
format has a scale of the whole tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Which matrices of a model are quantised, and to which format.

    Everything asks the same recipe: the converter, the training forward pass, the export of weights, the checks.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    format: str
    """`fp8`, `mxfp8`, `mxfp4`, `nvfp4`, `nvfp4_4o6` or `int4`, or a full name such as `fp8_128x128/te_pow2`."""
    only: tuple[str, ...] | None = None
    """Quantise only names that hold one of these substrings; empty for all. Unset: all; for NVFP4, routed experts."""
    keep_bf16: tuple[str, ...] = ()
    """Further substrings of names that stay as they are."""
    keep_first_layers: int = 0
    """So many first layers stay as they are."""
    keep_last_layers: int = 0
    """So many last layers stay as they are; needs `num_layers`."""
    num_layers: int | None = None
    """Layers of the model; filled in from its configuration by `for_model`."""
    source_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Weights are rounded to this type before they are quantised, on every side: a float32 master copy and the bfloat16
    checkpoint made from it then become the same codes."""
    quantize_activations: bool = True
    """On: the engine holds codes and scales, and quantises activations where the format has a type for them. Off: it is
    fed the values of the codes as plain weights and multiplies with activations as they are, as on a CPU."""

    def __post_init__(self) -> None:
        self._check_kinds()
        try:
            parse_name(self.format)
        except QuantError as error:
            raise QuantError(f"`format` is {self.format!r}. {error}") from None
        for name in ("keep_first_layers", "keep_last_layers"):
            if getattr(self, name) < 0:
                raise QuantError(f"`{name}` is {getattr(self, name)}; it counts layers and cannot be negative.")
        if self.source_dtype not in ("bfloat16", "float32"):
            raise QuantError(f"`source_dtype` is bfloat16 or float32, not {self.source_dtype!r}.")
        kept = self.keep_first_layers + self.keep_last_layers
        if self.num_layers is not None and kept >= self.num_layers:
            raise QuantError(f"{kept} layers are kept of {self.num_layers}: none would be quantised.")

    def _check_kinds(self) -> None:
        """A recipe read from a file may hold anything; a string in place of a list would be read as its letters."""
        for name in ("only", "keep_bf16"):
            value: object = getattr(self, name)
            strings = isinstance(value, (tuple, list)) and all(isinstance(part, str) and part for part in value)
            if not strings and not (name == "only" and value is None):
                raise QuantError(f"`{name}` is {value!r}; it is a list of substrings of names, none of them empty.")
        for name in ("keep_first_layers", "keep_last_layers", "num_layers"):
            value = getattr(self, name)
            if type(value) is not int and not (name == "num_layers" and value is None):
                raise QuantError(f"`{name}` is {value!r}; it is a whole number.")
        if not isinstance(self.format, str):
            raise QuantError(f"`format` is {self.format!r}; it is a name such as 'mxfp8'.")
        if not isinstance(self.quantize_activations, bool):
            raise QuantError(f"`quantize_activations` is {self.quantize_activations!r}; it is true or false.")

    @property
    def spec(self) -> Format:
        """The format itself; imports torch."""
        from ..formats.registry import get_format

        return get_format(self.format)

    def for_model(self, num_layers: int) -> Recipe:
        """This recipe for a model of so many layers."""
        if self.num_layers is not None and self.num_layers != num_layers:
            raise QuantError(f"The recipe is for {self.num_layers} layers and the model has {num_layers}.")
        return replace(self, num_layers=num_layers)

    def quantizes(self, name: str, shape: Sequence[int]) -> bool:
        """Whether the tensor `name` of `shape` is quantised."""
        format = parse_name(self.format)
        if len(shape) != 2 or 0 in shape or not name.endswith(".weight") or shape[1] % format.num_columns:
            return False
        only = self.only if self.only is not None else EXPERTS if format.family == "nvfp4" else ()
        if only and not any(part in name for part in only):
            return False
        if any(part in name for part in (*ALWAYS_KEPT, *self.keep_bf16)):
            return False
        layer = layer_index(name)
        if layer is None:
            return True
        if self.keep_last_layers and self.num_layers is None:
            raise QuantError("`keep_last_layers` needs `num_layers`, the number of layers of the model.")
        last = (self.num_layers or 0) - self.keep_last_layers
        return layer >= self.keep_first_layers and (not self.keep_last_layers or layer < last)

    def select(self, shapes: Mapping[str, Sequence[int]]) -> frozenset[str]:
        """The names of a model that are quantised.

        Raises:
            QuantError: none is, or a part of what engines load as one matrix, or a substring is in no name.
        """
        for key in ("only", "keep_bf16"):
            unused = [part for part in getattr(self, key) or () if not any(part in name for name in shapes)]
            if unused:
                raise QuantError(
                    f"`{key}` has {unused[0]!r}, which is in none of the model's {len(shapes)} names, e.g. "
                    f"{min(shapes, default='none')}. Correct it or take it out."
                )
        chosen = frozenset(name for name, shape in shapes.items() if self.quantizes(name, shape))
        if not chosen:
            raise QuantError(f"The recipe quantises none of the model's {len(shapes)} tensors: {self}.")
        for name in sorted(chosen):
            split = [sibling for sibling in siblings(name) if sibling in shapes and sibling not in chosen]
            if split:
                raise QuantError(
                    f"The recipe quantises {name} but not {split[0]}, which engines load as one matrix. "
                    "Keep all of them or none."
                )
        return chosen

    def to_dict(self) -> dict[str, Any]:
        """JSON values; `Recipe.from_dict` reads them."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Recipe:
        """The recipe of `to_dict`, or of a table of a configuration file.

        Raises:
            QuantError: an unknown key, a missing format or a value of the wrong kind.
        """
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown or "format" not in values:
            problem = f"does not know {', '.join(unknown)}" if unknown else "needs `format`"
            raise QuantError(f"A recipe {problem}; its keys are {', '.join(sorted(known))}.")
        plain: dict[str, Any] = dict(values)
        for key in ("only", "keep_bf16"):
            if isinstance(plain.get(key), list):
                plain[key] = tuple(plain[key])
        return cls(**plain)

    @classmethod
    def load(cls, text: str | Path) -> Recipe:
        """The recipe of a format name, or of a TOML or JSON file: its keys, or its table `quant` if it has one, such as
        the configuration of a run."""
        path = Path(text)
        if path.suffix not in (".toml", ".json"):
            return cls(format=str(text))
        try:
            content = path.read_text()
            values = json.loads(content) if path.suffix == ".json" else tomllib.loads(content)
        except (OSError, ValueError) as error:  # not there, not text, not of its language
            raise QuantError(f"The recipe {path} cannot be read: {error}") from error
        table = values.get("quant", values) if isinstance(values, dict) else None
        if not isinstance(table, dict):
            raise QuantError(f"{path} holds no recipe: a table with `format`, by itself or under `quant`.")
        return cls.from_dict(table)


def siblings(name: str) -> Iterator[str]:
    """All that engines load as one matrix with `name`, itself first."""
    yield name
    parts = name.split(".")
    for group in FUSED:
        if parts[-2:-1] and parts[-2] in group:
            yield from (".".join((*parts[:-2], other, parts[-1])) for other in group if other != parts[-2])


def layer_index(name: str) -> int | None:
    """The layer that a name belongs to: `model.layers.7.mlp.up_proj.weight` -> 7."""
    for part, following in itertools.pairwise(name.split(".")):
        if part == "layers" and following.isdigit():
            return int(following)
    return None
