"""Episodes to read, token by token: who wrote each, how likely it was, and which weights sampled it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from miles_tito.records import UNKNOWN_VERSION, Episode, Group, Trajectory
from tokenizers import Tokenizer

HEAD, TAIL = 900, 300
"""Tokens shown of a long trajectory: its beginning and its end."""
LEVELS = (-0.05, -0.5, -1.5, -3.0)
"""Bounds of the five shades: a token of log-prob above the first is unshaded, below the last is darkest."""


@dataclass(frozen=True, slots=True)
class ShownEpisode:
    """One episode worth reading, and why."""

    episode: Episode
    label: str
    fate: str
    """What became of its group, empty where that is not known."""
    siblings: int
    """Episodes of its group."""

    @property
    def sampled_by(self) -> str:
        """The oldest and the newest weights that sampled it."""
        versions = sorted({span.version for t in self.episode.trajectories for span in t.versions})
        ends = dict.fromkeys((versions[0], versions[-1]) if versions else (None,))
        return "\N{EN DASH}".join(map(_version_name, ends))


def pick_episodes(groups: Sequence[tuple[Group, str]]) -> list[ShownEpisode]:
    """The best and the worst episode of each group, and one that failed.

    Args:
        groups: in the order to show them, each with its fate.
    """
    shown: list[ShownEpisode] = []
    for group, fate in groups:
        episodes = [e for e in group.episodes if e.trajectories]
        scored = sorted((e for e in episodes if e.reward is not None), key=lambda e: e.reward or 0.0)
        picks = {"worst of its group": scored[0], "best of its group": scored[-1]} if scored else {}
        if scored and scored[0].reward == scored[-1].reward:
            picks = {"all of its group alike" if len(group.episodes) > 1 else "alone in its group": scored[0]}
        failed = next((e for e in episodes if e.reward is None), None)
        if failed is not None:
            picks["without a reward"] = failed
        shown += [ShownEpisode(e, label=label, fate=fate, siblings=len(group.episodes)) for label, e in picks.items()]
    return shown


def token_strip(trajectory: Trajectory, tokenizer: Tokenizer | None) -> list[dict[str, Any]]:
    """One trajectory: a block for each run of tokens of one author, `{"author": …, "items": …}`.

    An item is a token `[id, text]`, a sampled one `[id, text, logprob, level]` with its level of shade, the name of the
    weights that sampled what follows (`"v3"`), or the number of tokens that are left out here.
    """
    ids = [int(token) for token in trajectory.tokens]
    texts = token_texts(ids, tokenizer)
    versions: list[int | None] = [None] * len(ids)
    for span in trajectory.versions:
        versions[span.start : span.end] = [span.version] * (span.end - span.start)
    blocks: list[dict[str, Any]] = []
    version: int | None = None
    end = 0
    for sampled, run in itertools.groupby(trajectory.loss_mask.tolist()):
        start, end = end, end + len(list(run))
        items: list[Any] = []
        for i in _shown(start, end, len(ids)):
            if i is None:
                items.append(len(ids) - HEAD - TAIL)
                continue
            if sampled and versions[i] != version:
                version = versions[i]
                items.append(_version_name(version))
            logprob = float(trajectory.logprobs[i])
            shade = [round(logprob, 4), sum(logprob < bound for bound in LEVELS)] if sampled else []
            items.append([ids[i], texts[i], *shade])
        if items:
            author = "policy" if sampled else "prompt" if start == 0 else "environment"
            blocks.append({"author": author, "items": items})
    return blocks


def token_texts(ids: Sequence[int], tokenizer: Tokenizer | None) -> list[str]:
    """The text of each token in its place; `[id]` without a tokenizer."""
    if tokenizer is None:
        return [f"[{token}] " for token in ids]
    texts: list[str] = []
    for i, token in enumerate(ids):
        # Some decoders drop the space at the start of a text, so each token is read after its predecessor.
        before = tokenizer.decode([ids[i - 1]], skip_special_tokens=False) if i else ""
        both = tokenizer.decode([ids[i - 1], token], skip_special_tokens=False) if i else ""
        alone = tokenizer.decode([token], skip_special_tokens=False)
        texts.append(both[len(before) :] if i and len(both) > len(before) and both.startswith(before) else alone)
    return texts


def _shown(start: int, end: int, total: int) -> Iterator[int | None]:
    """Indices of the run to show; None once where the middle of a long trajectory is left out."""
    cut = total > HEAD + TAIL
    for i in range(start, end):
        if not cut or i < HEAD or i >= total - TAIL:
            yield i
        elif i == HEAD:
            yield None


def _version_name(version: int | None) -> str:
    return "v?" if version is None or version == UNKNOWN_VERSION else f"v{version}"
