"""Episodes to read, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from miles_tito.records import Episode, Group

from .strips import token_strip
from .text import safe

_SHADES = ("p > .95", "> .6", "> .2", "> .05", "less")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """One episode worth reading, and why."""

    episode: Episode
    label: str
    fate: str
    """What became of its group, empty where that is not known."""
    siblings: int
    """Episodes of its group."""


def pick(told: Sequence[tuple[Group, str]]) -> list[Shown]:
    """The best and the worst episode of each group, and one that failed.

    Args:
        told: groups in the order to show them, each with its fate.
    """
    shown: list[Shown] = []
    for group, fate in told:
        episodes = [e for e in group.episodes if e.trajectories]
        scored = sorted((e for e in episodes if e.reward is not None), key=lambda e: e.reward or 0.0)
        picks = {"worst of its group": scored[0], "best of its group": scored[-1]} if scored else {}
        if scored and scored[0].reward == scored[-1].reward:
            picks = {"all of its group alike" if len(group.episodes) > 1 else "alone in its group": scored[0]}
        failed = next((e for e in episodes if e.reward is None), None)
        if failed is not None:
            picks["without a reward"] = failed
        siblings = len(group.episodes)
        shown += [Shown(episode=e, label=label, fate=fate, siblings=siblings) for label, e in picks.items()]
    return shown


def conversations_section(shown: Sequence[Shown], tokenizer: Any) -> str:
    if not shown:
        return ""
    shades = "".join(f'<i class="t l{level}">{name}</i>' for level, name in enumerate(_SHADES))
    legend = (
        "<p>Tokens as the trainer sees them. Shaded ones were sampled by the policy and are trained; the warmer, the "
        'less likely. <b class="v">v3</b> marks where weights of version 3 take over.</p>'
        f'<p class="shades">{shades}</p>'
    )
    episodes = "".join(episode(one, tokenizer, is_open=i in (0, len(shown) - 1)) for i, one in enumerate(shown))
    return f'<section class="conversations"><h2>Conversations</h2>{legend}{episodes}</section>'


def episode(shown: Shown, tokenizer: Any, *, is_open: bool = False) -> str:
    """One episode to open."""
    told = shown.episode
    versions = sorted({span.version for t in told.trajectories for span in t.versions})
    sampled_by = (
        f"v{versions[0]}" if len(versions) == 1 else f"v{versions[0]}\N{EN DASH}v{versions[-1]}" if versions else "v?"
    )
    reward = "no reward" if told.reward is None else f"reward {told.reward:.3g}"
    tokens = f"{told.loss_denominator} of {sum(len(t.tokens) for t in told.trajectories)} tokens sampled"
    facts = [f"sampled by {sampled_by}", shown.fate, shown.label, tokens, str(told.outcome).replace("_", " ")]
    error = f'<p class="note">{safe(told.error)}</p>' if told.error else ""
    strips = "".join(f'<div class="strip">{token_strip(t, tokenizer)}</div>' for t in told.trajectories)
    siblings = f", one of {shown.siblings} siblings" if shown.siblings > 1 else ""
    return (
        f"<details{' open' if is_open else ''}><summary><strong>{reward}</strong> "
        f"{' · '.join(safe(fact) for fact in facts if fact)}<small>prompt {safe(told.prompt_id)}{siblings}</small>"
        f"</summary>{error}{strips}</details>"
    )
