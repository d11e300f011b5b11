"""How long to wait before the next try."""

from __future__ import annotations


def delay_s(number: int, *, first_s: float, longest_s: float) -> float:
    """Seconds before retry `number`, counted from 0: they double from `first_s` up to `longest_s`."""
    return min(first_s * 2.0 ** min(number, 60), longest_s)
