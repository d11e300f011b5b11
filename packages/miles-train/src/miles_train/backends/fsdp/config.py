"""`[train.fsdp]`. Importable without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from miles_tito.shared.settings import require


@dataclass(frozen=True, slots=True, kw_only=True)
class FSDPConfig:
    """What FSDP2, and training a Hugging Face model, has of its own."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012  (read by pydantic in miles-core; no dependency here)

    layout: Literal["auto", "packed", "padded"] = "auto"
    """How rows reach the model: one packed row (no padding outside attention), or a right-padded matrix for
    models whose attention cannot be replaced. `auto` packs where the model allows it."""
    activation_checkpointing: bool = False
    """Recompute each decoder layer in the backward pass: less memory, about a third more time."""
    reshard_after_forward: bool = True
    """Free each layer's gathered weights after its forward pass (several ranks only): less memory, one more gather."""

    def __post_init__(self) -> None:
        require(self.layout in ("auto", "packed", "padded"), "layout", self.layout, "auto, packed or padded")
