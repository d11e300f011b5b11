"""How sure a score is: standard errors and confidence intervals of values that come one a prompt.

Samples of one prompt are alike, so prompts and not samples are the independent units: a score is the mean of one value
for each prompt, and its standard error comes from how these values differ ("clustered" errors, arXiv:2411.00640 §2.2).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

LEVEL = 0.95
"""Confidence of the intervals that are reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A confidence interval: it holds the true value in `LEVEL` of all repetitions with other prompts and samples."""

    low: float
    high: float


def mean(values: Sequence[float]) -> float | None:
    """None without values."""
    return math.fsum(values) / len(values) if values else None


def standard_error(values: Sequence[float]) -> float | None:
    """Of the mean of one value a prompt; None below two prompts."""
    if len(values) < 2:
        return None
    center = math.fsum(values) / len(values)
    variance = math.fsum((value - center) ** 2 for value in values) / (len(values) - 1)
    return math.sqrt(variance / len(values))


def mean_interval(values: Sequence[float], *, level: float = LEVEL) -> Interval | None:
    """Student's interval, mean ± t · se with n - 1 degrees of freedom; None below two prompts."""
    center, error = mean(values), standard_error(values)
    if center is None or error is None:
        return None
    reach = student_quantile(0.5 + level / 2, len(values) - 1) * error
    return Interval(low=center - reach, high=center + reach)


def share_interval(values: Sequence[float], *, level: float = LEVEL) -> Interval | None:
    """Wilson's score interval for values in [0, 1], with the effective number of prompts; None below two.

    Values between 0 and 1 differ less than coin flips of the same mean, as if there were m = p (1 - p) / se² flips
    instead of n, scaled by (z / t)² because se is itself an estimate (Korn and Graubard, Survey Methodology 24, 1998;
    Wilson's interval with it: Franco et al., J. Survey Statistics and Methodology 7, 2019). Unlike mean ± t · se it
    stays inside [0, 1], and has a width where every prompt has the same value: with all right, 1 is not certain.
    """
    center, error = mean(values), standard_error(values)
    if center is None or error is None:
        return None
    n = len(values)
    z = NormalDist().inv_cdf(0.5 + level / 2)
    if 0.0 < center < 1.0 and error > 0.0:
        shrink = z / student_quantile(0.5 + level / 2, n - 1)
        n = max(center * (1.0 - center) / error**2 * shrink**2, 1.0)
    middle = (center + z**2 / (2 * n)) / (1 + z**2 / n)
    reach = z / (1 + z**2 / n) * math.sqrt(max(center * (1.0 - center), 0.0) / n + z**2 / (4 * n**2))
    return Interval(low=max(middle - reach, 0.0), high=min(middle + reach, 1.0))


def student_quantile(p: float, degrees: int) -> float:
    """Quantile of Student's t: exact for 1 and 2 degrees of freedom, else within 0.2 % for p up to 0.975.

    The expansion is Abramowitz and Stegun 26.7.5.
    """
    if degrees == 1:
        return math.tan(math.pi * (p - 0.5))
    if degrees == 2:
        return (2 * p - 1) / math.sqrt(2 * p * (1 - p))
    x = NormalDist().inv_cdf(p)
    terms = (
        (x**3 + x) / 4,
        (5 * x**5 + 16 * x**3 + 3 * x) / 96,
        (3 * x**7 + 19 * x**5 + 17 * x**3 - 15 * x) / 384,
        (79 * x**9 + 776 * x**7 + 1482 * x**5 - 1920 * x**3 - 945 * x) / 92160,
    )
    return x + math.fsum(term / degrees**power for power, term in enumerate(terms, start=1))
