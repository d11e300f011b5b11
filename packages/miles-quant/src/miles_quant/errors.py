"""The errors of miles-quant. The package imports no sibling, so that its folder can be vendored as it is."""

from __future__ import annotations


class QuantError(ValueError):
    """A tensor, block, recipe or file cannot be quantised as asked."""


class ModelFolderError(QuantError):
    """A model folder is incomplete, damaged or not what its configuration says."""


CheckpointError = ModelFolderError
"""The name it had when `miles_train` had an error of that name too."""
