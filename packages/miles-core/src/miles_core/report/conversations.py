"""Episodes to read, token by token: who wrote each, how likely it was, and which weights sampled it."""

from __future__ import annotations

from collections.abc import Sequence
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
    """The best and the worst episode of each group, and one that failed; any of them where none has a conversation."""
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
        if not picks and group.episodes:
            picks = {"without a conversation": group.episodes[0]}
        shown += [ShownEpisode(e, label=label, fate=fate, siblings=len(group.episodes)) for label, e in picks.items()]
    return shown


def token_strip(trajectory: Trajectory, tokenizer: Tokenizer | None) -> list[dict[str, Any]]:
    """One trajectory: a block for each run of tokens of one author, `{"author": …, "items": …}`.

    An item is a token `[id, text]`, a sampled one `[id, text, logprob, level]` with its level of shade, the name of the
    weights that sampled what follows (`"v3"`), or the number of tokens that are left out here.
    """
    ids, mask = trajectory.tokens.tolist(), trajectory.loss_mask.tolist()
    first_sampled = mask.index(True) if True in mask else len(mask)
    versions: list[int | None] = [None] * len(ids)
    for span in trajectory.versions:
        versions[span.start : span.end] = [span.version] * (span.end - span.start)
    num_left_out = max(len(ids) - HEAD - TAIL, 0)
    blocks: list[dict[str, Any]] = []
    version: int | None = None
    for i, (token, sampled) in enumerate(zip(ids, mask, strict=True)):
        if HEAD < i < HEAD + num_left_out:
            continue
        author = "policy" if sampled else "prompt" if i < first_sampled else "environment"
        if not blocks or blocks[-1]["author"] != author:
            blocks.append({"author": author, "items": []})
        items = blocks[-1]["items"]
        if i == HEAD and num_left_out:
            items.append(num_left_out)
            continue
        if sampled and versions[i] != version:
            version = versions[i]
            items.append(_version_name(version))
        logprob = float(trajectory.logprobs[i])
        shade = [round(logprob, 4), sum(logprob < bound for bound in LEVELS)] if sampled else []
        items.append([token, token_text(ids, i, tokenizer), *shade])
    return blocks


def token_text(ids: Sequence[int], i: int, tokenizer: Tokenizer | None) -> str:
    """The text of token `i` in its place; `[id]` without a tokenizer."""
    if tokenizer is None:
        return f"[{ids[i]}] "
    alone = tokenizer.decode([ids[i]], skip_special_tokens=False)
    if i == 0:
        return alone
    # Some decoders drop the space at the start of a text, so each token is read after its predecessor.
    before = tokenizer.decode([ids[i - 1]], skip_special_tokens=False)
    both = tokenizer.decode([ids[i - 1], ids[i]], skip_special_tokens=False)
    return both[len(before) :] if len(both) > len(before) and both.startswith(before) else alone


def _version_name(version: int | None) -> str:
    return "v?" if version is None or version == UNKNOWN_VERSION else f"v{version}"
