"""The trainer that a configuration asks for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from .config import TrainConfig

if TYPE_CHECKING:
    from .fsdp import FSDPTrainer


def create_trainer(
    config: TrainConfig, *, model_path: str | Path, rank: int = 0, init_method: str | None = None
) -> FSDPTrainer:
    """One rank of the configured backend, not yet set up; torch is imported only here."""
    match config.backend:
        case "fsdp":
            from .fsdp import FSDPTrainer

            return FSDPTrainer(model_path, rank=rank, init_method=init_method)
