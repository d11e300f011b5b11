"""What a step reports: means and maxima over loss tokens, joined over micro-batches and ranks.

Only loss tokens are counted: masked, filtered and dummy ones never reach this module.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .losses.inputs import LossInputs, TokenLoss
from .losses.policy import importance_ratio


class Tallied(NamedTuple):
    """One rank's metrics as numbers, ready to be joined with the others'."""

    sums: dict[str, float]
    counts: dict[str, int]
    """How many tokens a sum is over; 1 stands for a plain total."""
    maxima: dict[str, float]


class Tally:
    """What one rank reports of a call of `train`, collected over its micro-batches.

    Tensors become numbers once, in `close`, so that a GPU is not waited for in between.
    """

    def __init__(self) -> None:
        self._sums: dict[str, list[Tensor]] = {}
        self._counts: dict[str, int] = {}
        self._maxima: dict[str, list[Tensor]] = {}

    def mean(self, name: str, values_M: Tensor) -> None:
        """Report the mean of values over all tokens of all ranks."""
        self._sums.setdefault(name, []).append(values_M.detach().double().sum())
        self._counts[name] = self._counts.get(name, 0) + len(values_M)

    def total(self, name: str, value: Tensor) -> None:
        """Report the sum over micro-batches and ranks."""
        self._sums.setdefault(name, []).append(value.detach().double())

    def maximum(self, name: str, values_M: Tensor) -> None:
        self._maxima.setdefault(name, []).append(values_M.detach().double().max())

    def close(self) -> Tallied:
        return Tallied(
            _numbers({name: torch.stack(values).sum() for name, values in self._sums.items()}),
            self._counts,
            _numbers({name: torch.stack(values).max() for name, values in self._maxima.items()}),
        )


def joined(ranks: Iterable[Tallied]) -> dict[str, float]:
    """Metrics of the whole batch from every rank's tally."""
    sums: dict[str, float] = {}
    counts: dict[str, int] = {}
    maxima: dict[str, float] = {}
    for tallied in ranks:
        for name, value in tallied.sums.items():
            sums[name] = sums.get(name, 0.0) + value
        for name, count in tallied.counts.items():
            counts[name] = counts.get(name, 0) + count
        for name, value in tallied.maxima.items():
            maxima[name] = max(maxima.get(name, value), value)
    metrics = {name: value / counts.get(name, 1) for name, value in sums.items()} | maxima
    square = metrics.pop("ratio/engine_square", 0.0)
    if square > 0:
        # effective sample size, (sum w)² / (n sum w²), as a fraction of the tokens
        metrics["ratio/ess"] = metrics["ratio/engine_mean"] ** 2 / square
    return metrics


def tally_loss(tally: Tally, inputs: LossInputs, token_loss: TokenLoss) -> None:
    """The loss, the entropy and the loss's own metrics of one micro-batch."""
    tally.total("loss/total", (inputs.weights * token_loss.loss.detach()).sum())
    if inputs.entropy is not None:
        tally.mean("entropy/mean", inputs.entropy)
    for name, values in token_loss.metrics.items():
        tally.mean(name, values)


def tally_ratio(tally: Tally, inputs: LossInputs) -> None:
    """How far the policy has moved from the old one."""
    logprobs = inputs.logprobs.detach()
    ratio = importance_ratio(logprobs, inputs.old_logprobs)
    tally.mean("ratio/mean", ratio)
    tally.maximum("ratio/max", ratio)
    # k3 with the old policy as the sampler: r - 1 - log r
    tally.mean("ratio/approx_kl", ratio - 1 - (logprobs - inputs.old_logprobs))


def tally_gap(tally: Tally, logprobs_M: Tensor, engine_M: Tensor, versions_M: np.ndarray, *, version: int) -> None:
    """|log p(trainer) - log p(engine)|, all tokens and by the version that sampled them.

    Tokens of `version` were sampled under the very weights that score them now: their gap is pure numerics.
    """
    weight = importance_ratio(logprobs_M, engine_M)
    tally.mean("ratio/engine_mean", weight)
    tally.mean("ratio/engine_square", weight.double().square())
    gap = (logprobs_M - engine_M).abs()
    tally.mean("logprob_gap/mean", gap)
    tally.maximum("logprob_gap/max", gap)
    for sampled in np.unique(versions_M).tolist():
        chosen = gap[torch.from_numpy(versions_M == sampled).to(gap.device)]
        tally.mean(f"logprob_gap/version_{'unknown' if sampled < 0 else sampled}", chosen)
        if sampled == version:
            tally.mean("logprob_gap/same_version_mean", chosen)
            tally.maximum("logprob_gap/same_version_max", chosen)


def _numbers(values: Mapping[str, Tensor]) -> dict[str, float]:
    if not values:
        return {}
    return dict(zip(values, torch.stack(list(values.values())).tolist(), strict=True))
