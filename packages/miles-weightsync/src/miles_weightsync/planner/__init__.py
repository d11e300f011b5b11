"""Which rank sends which box of which tensor to which rank. Standard library only."""

from .cuts import Part
from .layout import Block, Layout, TensorLayout
from .model import ModelShape, Tensor
from .plan import Copy, Plan, make_plan
from .presets import PRESETS, Preset
from .sglang import SGLang
from .trainer import Megatron, fsdp_layout, full_layout

__all__ = [
    "PRESETS",
    "Block",
    "Copy",
    "Layout",
    "Megatron",
    "ModelShape",
    "Part",
    "Plan",
    "Preset",
    "SGLang",
    "Tensor",
    "TensorLayout",
    "fsdp_layout",
    "full_layout",
    "make_plan",
]
