"""Supervised samples in the shape of policy samples, so that both go through one loop."""

from __future__ import annotations

from typing import Any

import numpy as np
from miles_tito.records import UNKNOWN_VERSION, Sample, VersionSpan


def sft_sample(id: str, tokens: Any, loss_mask: Any, *, weight: float = 1.0, prompt_id: str = "") -> Sample:
    """A demonstration to imitate; train it with `SftLoss()`.

    Args:
        id: name of the sample; it is its own episode and group.
        tokens: [T] ids, prompt and answer.
        loss_mask: [T] True on the tokens to imitate. The first token cannot be one.
        weight: how much the sample counts, carried as its advantage.
        prompt_id: the prompt it answers, `id` where none is given.
    """
    mask = np.asarray(loss_mask, dtype=np.bool_)
    return Sample(
        id=id,
        episode_id=id,
        group_id=id,
        prompt_id=prompt_id or id,
        tokens=np.asarray(tokens, dtype=np.int32),
        loss_mask=mask,
        logprobs=np.zeros(len(mask), dtype=np.float32),
        advantage=weight,
        loss_denominator=max(1, int(mask.sum())),
        versions=(VersionSpan(start=0, end=len(mask), version=UNKNOWN_VERSION),) if len(mask) else (),
    )
