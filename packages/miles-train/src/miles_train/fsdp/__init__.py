"""The FSDP2 backend: any Hugging Face causal language model on one rank or many."""

from .trainer import FSDPTrainer

__all__ = ["FSDPTrainer"]
