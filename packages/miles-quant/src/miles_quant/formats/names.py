"""Names of formats: `family/rule`, the same in recipes, golden vectors, tables and errors. Needs no torch.

fp8_tensor, fp8_row, fp8_128x128, fp8_1x128, any fp8_RxC     / div, miles, te, te_pow2
mxfp8, mxfp4                                                 / rceil, floor, even
nvfp4    / te, te_row, te_4o6_MSE, te_4o6_MAE, te_row_4o6_MSE, te_row_4o6_MAE, modelopt, torchao2, 1level
int4_g32, int4_g128, any int4_gN                             / miles, ct
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..errors import QuantError

FP8_RULES = ("div", "miles", "te", "te_pow2")
MX_RULES = ("rceil", "floor", "even")
NVFP4_RULES = (
    "te",
    "te_row",
    "te_4o6_MSE",
    "te_4o6_MAE",
    "te_row_4o6_MSE",
    "te_row_4o6_MAE",
    "modelopt",
    "torchao2",
    "1level",
)
INT4_RULES = ("miles", "ct")

SHORT_NAMES = {
    "fp8": "fp8_128x128/div",
    "mxfp8": "mxfp8/rceil",
    "mxfp4": "mxfp4/rceil",
    "nvfp4": "nvfp4/te",
    "nvfp4_4o6": "nvfp4/te_4o6_MSE",
    "int4": "int4_g32/miles",
}
"""What the plain name of a family stands for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatName:
    """The parts of a format's name; `parse_name` makes it. Enough for a configuration, which needs no torch."""

    family: str
    """`fp8`, `mxfp8`, `mxfp4`, `nvfp4` or `int4`."""
    layout: str
    """FP8: `tensor`, `row` or `RxC`. INT4: the group size. Else empty."""
    rule: str
    """How the scale follows from the largest absolute value."""

    def __str__(self) -> str:
        match self.family:
            case "fp8":
                return f"fp8_{self.layout}/{self.rule}"
            case "int4":
                return f"int4_g{self.layout}/{self.rule}"
            case _:
                return f"{self.family}/{self.rule}"

    @property
    def num_columns(self) -> int:
        """Columns that share a scale: K has to be a multiple of it (1: any K)."""
        match self.family:
            case "fp8":
                return 1 if self.layout in ("tensor", "row") else int(self.layout.partition("x")[2])
            case "int4":
                return max(int(self.layout), 8)  # eight codes to a word
            case "nvfp4":
                return 16
            case _:
                return 32

    @property
    def has_tensor_scale(self) -> bool:
        """One number of the whole tensor enters every code: shards of it must agree on the largest value."""
        if self.family == "fp8":
            return self.layout == "tensor"
        return self.family == "nvfp4" and "row" not in self.rule and self.rule != "1level"


def parse_name(name: str) -> FormatName:
    """The parts of a full or short name.

    Raises:
        QuantError: no format has this name; the message lists the families and their rules.
    """
    family, _, rule = SHORT_NAMES.get(name, name).partition("/")
    if (found := re.fullmatch(r"fp8_(tensor|row|[1-9]\d*x[1-9]\d*)", family)) and rule in FP8_RULES:
        return FormatName(family="fp8", layout=found[1], rule=rule)
    if family in ("mxfp8", "mxfp4") and rule in MX_RULES:
        return FormatName(family=family, layout="", rule=rule)
    if family == "nvfp4" and rule in NVFP4_RULES:
        return FormatName(family="nvfp4", layout="", rule=rule)
    if (found := re.fullmatch(r"int4_g([1-9]\d*)", family)) and rule in INT4_RULES and int(found[1]) % 8 == 0:
        return FormatName(family="int4", layout=found[1], rule=rule)
    raise QuantError(
        f"No format is named {name!r}. Short names: {', '.join(SHORT_NAMES)}. Full names are family/rule: "
        f"fp8_128x128, fp8_1x128, fp8_row, fp8_tensor with {', '.join(FP8_RULES)}; mxfp8, mxfp4 with "
        f"{', '.join(MX_RULES)}; nvfp4 with {', '.join(NVFP4_RULES)}; int4_g32 (any multiple of 8) with "
        f"{', '.join(INT4_RULES)}."
    )
