"""Elements as integers of their size, by bytes: NumPy has no bfloat16 or float8, and comparing bits needs no types."""

from __future__ import annotations

import numpy as np
import torch

SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""torch's: it computes with few unsigned ones."""
NUMPY_SIGNED = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def as_signed(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers."""
    return tensor.view(SIGNED[tensor.element_size()])
