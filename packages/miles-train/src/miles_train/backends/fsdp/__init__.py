"""The FSDP2 backend: any Hugging Face causal language model on one rank or many."""

from .config import FSDPConfig

__all__ = ["FSDPConfig"]
