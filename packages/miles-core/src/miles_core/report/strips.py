"""Conversations as strips of tokens: who wrote each, how likely it was, and which weights sampled it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from miles_tito.records import UNKNOWN_VERSION, Trajectory
from tokenizers import Tokenizer

from .text import safe

HEAD, TAIL = 900, 300
"""Tokens shown of a long trajectory: its beginning and its end."""

LEVELS = (-0.05, -0.5, -1.5, -3.0)
"""Bounds of the five shades: a token of log-prob above the first is unshaded, below the last is darkest."""


def pieces(ids: Sequence[int], tokenizer: Tokenizer | None) -> list[str]:
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


def token_strip(trajectory: Trajectory, tokenizer: Tokenizer | None) -> str:
    """HTML of one trajectory: a block for each run of tokens of one author."""
    ids = [int(token) for token in trajectory.tokens]
    versions = _versions(trajectory)
    texts = pieces(ids, tokenizer)
    blocks: list[str] = []
    version: int | None = None
    for start, end in _runs(trajectory.loss_mask.tolist()):
        sampled = bool(trajectory.loss_mask[start])
        author = "policy" if sampled else "prompt" if start == 0 else "environment"
        spans: list[str] = []
        for i in _shown(start, end, len(ids)):
            if i is None:
                spans.append(f'<b class="cut">… {len(ids) - HEAD - TAIL} tokens left out …</b>')
                continue
            if sampled and versions[i] != version:
                version = versions[i]
                spans.append(f'<b class="v">{_version_name(version)}</b>')
            spans.append(_token(ids[i], texts[i], float(trajectory.logprobs[i]) if sampled else None, versions[i]))
        if spans:
            blocks.append(f'<div class="turn {author}"><span class="who">{author}</span><p>{"".join(spans)}</p></div>')
    return "".join(blocks)


def _token(token: int, text: str, logprob: float | None, version: int | None) -> str:
    special = " special" if text.startswith("<|") and text.rstrip("\n").endswith("|>") else ""
    if logprob is None:
        return f'<i class="t{special}" data-t="{token}">{safe(text)}</i>'
    level = sum(logprob < bound for bound in LEVELS)
    data = f"{token}|{logprob:.4f}|{_version_name(version)}"
    return f'<i class="t l{level}{special}" data-t="{data}">{safe(text)}</i>'


def _runs(mask: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """Half-open ranges over which `mask` does not change."""
    start = 0
    for _, run in itertools.groupby(mask):
        end = start + len(list(run))
        yield start, end
        start = end


def _shown(start: int, end: int, total: int) -> Iterator[int | None]:
    """Indices of the run to show; None once where the middle of a long trajectory is left out."""
    cut = total > HEAD + TAIL
    for i in range(start, end):
        if not cut or i < HEAD or i >= total - TAIL:
            yield i
        elif i == HEAD:
            yield None


def _versions(trajectory: Trajectory) -> list[int | None]:
    versions: list[int | None] = [None] * len(trajectory.tokens)
    for span in trajectory.versions:
        versions[span.start : span.end] = [span.version] * (span.end - span.start)
    return versions


def _version_name(version: int | None) -> str:
    return "v?" if version is None or version == UNKNOWN_VERSION else f"v{version}"
