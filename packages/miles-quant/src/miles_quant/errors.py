"""The errors of miles-quant. The package imports no sibling, so that its folder can be vendored as it is."""

from __future__ import annotations


class QuantError(ValueError):
    """A tensor, block or recipe cannot be quantised as asked."""
