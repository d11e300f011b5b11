"""Which finished groups are worth a place in a batch, judged by the raw outcome."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from miles_tito import FinishReason, GroupRef
from miles_tito.shared.plugins import Plugin, resolve

Filter = Callable[[GroupRef], "str | None"]
"""None keeps the group; otherwise a short reason that can be counted."""


def has_spread(rewards: Sequence[float]) -> bool:
    """Whether rewards differ by more than rounding, so that a baseline tells siblings apart."""
    if len(rewards) < 2:
        return False
    low, high = min(rewards), max(rewards)
    return high - low > 1e-9 * max(abs(low), abs(high))


def nonzero_spread(ref: GroupRef) -> str | None:
    """Discard a group whose siblings all got the same reward: its advantages are all 0.

    Dynamic sampling of DAPO (arXiv:2503.14476 §3.2), for rewards of any range.
    """
    rewards = [reward for reward in ref.rewards if reward is not None]
    return None if has_spread(rewards) else "zero_spread"


def no_truncated(ref: GroupRef) -> str | None:
    """Discard a group with a trajectory that was cut off by its token limit."""
    cut = any(t.finish_reason == FinishReason.LENGTH for e in ref.episodes for t in e.trajectories)
    return "truncated" if cut else None


def no_filter(ref: GroupRef) -> str | None:
    """Keep every group."""
    return None


def compose(*filters: Filter) -> Filter:
    """The first reason that any of `filters` gives, in order."""

    def first_reason(ref: GroupRef) -> str | None:
        return next((reason for f in filters if (reason := f(ref)) is not None), None)

    return first_reason


FILTERS: Mapping[str, Filter] = MappingProxyType(
    {"nonzero_spread": nonzero_spread, "no_truncated": no_truncated, "no_filter": no_filter}
)
"""The built-in filters by name."""


def load_filter(choice: str | Plugin | Filter) -> Filter:
    """The filter that a setting names, its arguments bound."""
    return resolve(choice, FILTERS, kind="filter", positional=1)
