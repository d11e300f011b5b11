"""The FSDP2 trainer under its short name."""

from .backends.fsdp.trainer import FSDPTrainer

__all__ = ["FSDPTrainer"]
