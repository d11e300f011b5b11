"""How SGLang lays a model's parameters out, one module a family of architectures."""

from .dense import ARCHITECTURES, Division, Placement, local_block, local_shape, locate

__all__ = ["ARCHITECTURES", "Division", "Placement", "local_block", "local_shape", "locate"]
