"""Which charts a report shows, from the rows of `metrics.jsonl`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Literal

from miles_core.monitor.names import METRICS, describe
from miles_core.monitor.summary import TERMINAL_FATES

from .chart import Chart, Series

MAX_POINTS = 300
Rows = Sequence[Mapping[str, float]]


def thin(rows: Rows, limit: int = MAX_POINTS) -> list[dict[str, float]]:
    """At most `limit` rows: neighbours are merged into their mean, maxima into the maximum, counts into the last."""
    if len(rows) <= limit:
        return [dict(row) for row in rows]
    bounds = [len(rows) * i // limit for i in range(limit + 1)]
    return [_merge(rows[a:b]) for a, b in itertools.pairwise(bounds)]


def by_lag(rows: Rows) -> list[dict[str, float]]:
    """`logprob_gap/version_7` of step 9 as `logprob_gap/lag_1`: step 9 trains, and therefore scores with, version 8."""
    return [{_lag_name(name, row["step"]): value for name, value in row.items()} for row in rows]


def main_charts(rows: Rows) -> list[Chart]:
    """The charts that every reader wants, the one that answers whether it learns first; none without values."""
    charts = [
        _reward(rows),
        _lines(
            rows,
            "Demonstrations",
            "Mean negative log-probability of the tokens to imitate.",
            (("nats a token", "loss/nll"),),
            size="wide",
        ),
        _lines(rows, "Episode length", "Tokens that the policy sampled in an episode.", _LENGTHS, floor=0),
        _lines(
            rows,
            "Staleness",
            "Weight versions between an episode's oldest token and the weights that it trains.",
            (("mean", "staleness/mean"), ("maximum", "staleness/max")),
            floor=0,
        ),
        _gap(rows),
        _time_split(rows),
        _sync(rows),
        _pause(rows),
        _fates(rows),
        _lines(
            rows,
            "Gradient",
            "Norm of the gradient before clipping: spikes come before a run falls apart.",
            (("norm", "optimizer/grad_norm"),),
            floor=0,
        ),
        _lines(rows, "Throughput", "Tokens that all engines sample a second.", (("tokens/s", "engine/tokens_per_s"),)),
        _lines(
            rows,
            "Utilisation",
            "Share of the step in which the part was busy.",
            (("engines", "engine/utilisation"), ("trainer", "trainer/utilisation")),
            floor=0,
            ceiling=1,
        ),
    ]
    return [chart for chart in charts if not chart.is_empty()]


def warm_up_charts(rows: Rows) -> list[Chart]:
    """What SFT before RL did; nothing where there was none."""
    note = "SFT before RL: mean negative log-probability of the tokens to imitate."
    chart = _lines(rows, "Warm-up", note, (("nats a token", "loss/nll"),))
    return [] if chart.is_empty() else [chart]


def other_charts(rows: Rows, *, drawn: Iterable[Chart]) -> list[Chart]:
    """One small chart for every metric that the main charts leave out, in the catalogue's order."""
    used = ["step", "time", *(pattern for chart in drawn for pattern in chart.metrics)]
    names = {name for row in rows for name in row if not any(fnmatchcase(name, pattern) for pattern in used)}
    return [
        Chart(
            title=name,
            note=describe(name) or "",
            x=_column(rows, "step"),
            series=[Series(name=name, values=_column(rows, name))],
            size="small",
        )
        for name in sorted(names, key=_catalogue_order)
    ]


_LAG = "logprob_gap/lag_"
_LENGTHS = (("mean", "episode/tokens"), ("maximum", "episode/tokens_max"))
_TIMES = (
    ("wait for groups", "time/take_wait", 7),
    ("train", "time/train", 1),
    ("weight update", "time/sync", 2),
    ("evaluate, write", "time/on_step", 3),
)
_PHASES = {"pause": 7, "write": 1, "send": 3, "load": 2, "verify": 5, "resume": 6}
_FATES = dict(zip(TERMINAL_FATES, (1, 3, 2, 4, 5), strict=True)) | {"in_flight": 7}


def _reward(rows: Rows) -> Chart:
    mean, std = _column(rows, "reward/mean"), _column(rows, "reward/std")
    # The band stays among rewards that occurred: 0.9 ± 0.3 of a reward in [0, 1] does not reach 1.2.
    least = min((row["reward/min"] for row in rows if "reward/min" in row), default=-math.inf)
    most = max((row["reward/max"] for row in rows if "reward/max" in row), default=math.inf)
    score, error = _column(rows, "eval/score"), _column(rows, "eval/stderr")
    series = [
        Series(
            name="training, mean ± standard deviation",
            values=mean,
            low=[max(m - s, least) for m, s in zip(mean, std, strict=True)],
            high=[min(m + s, most) for m, s in zip(mean, std, strict=True)],
        )
    ]
    if any(math.isfinite(value) for value in score):
        error = [0.0 if math.isnan(e) else e for e in error]
        series.append(
            Series(
                name="held-out, ± standard error",
                values=score,
                colour=2,
                kind="points",
                low=[s - e for s, e in zip(score, error, strict=True)],
                high=[s + e for s, e in zip(score, error, strict=True)],
            )
        )
    return Chart(
        title="Reward",
        note="Episodes trained in each step, and problems never trained on.",
        x=_column(rows, "step"),
        series=series,
        metrics=("reward/mean", "reward/std", "reward/min", "reward/max", "eval/score", "eval/stderr"),
        size="wide",
    )


def _gap(rows: Rows) -> Chart:
    fixed = [
        ("maximum", "logprob_gap/max", 4),
        ("maximum, same version", "logprob_gap/same_version_max", 2),
        ("mean", "logprob_gap/mean", 1),
    ]
    lags = sorted({name for row in rows for name in row if name.startswith(_LAG)})
    fixed += [(f"mean, lag {name.removeprefix(_LAG)}", name, (3, 5, 6, 7)[min(i, 3)]) for i, name in enumerate(lags)]
    return Chart(
        title="Log-prob gap",
        note="|log p(trainer) \N{MINUS SIGN} log p(engine)| of sampled tokens. Lag 0: the very weights that score them "
        "sampled them, so the gap is numerics alone and belongs below the line.",
        x=_column(rows, "step"),
        series=[
            Series(name=label, values=_column(rows, name), colour=colour)
            for label, name, colour in fixed
            if any(name in row for row in rows)
        ],
        metrics=("logprob_gap/*",),
        log=True,
        limit=(1e-4, "1e-4"),
    )


def _time_split(rows: Rows) -> Chart:
    parts = [
        Series(name=label, values=_column(rows, name), colour=colour)
        for label, name, colour in _TIMES
        if any(name in row for row in rows)
    ]
    known = [sum(v for v in column if math.isfinite(v)) for column in zip(*(s.values for s in parts), strict=True)]
    whole = _column(rows, "time/step")
    if parts and any(math.isfinite(value) for value in whole):
        rest = [max(w - k, 0.0) for w, k in zip(whole, known, strict=True)]
        parts.append(Series(name="other", values=rest, colour=6))
    return Chart(
        title="Time of a step",
        note="Seconds; engines go on generating meanwhile.",
        x=_column(rows, "step"),
        series=parts,
        metrics=("time/step", *(name for _, name, _ in _TIMES)),
        layout="bars",
        unit=" s",
    )


def _sync(rows: Rows) -> Chart:
    names = {phase: f"sync/{phase}_seconds" for phase in _PHASES}
    return Chart(
        title="Weight update",
        note="Seconds of each phase, on the slowest engine; sending and loading overlap.",
        x=_column(rows, "step"),
        series=[
            Series(name=phase, values=_column(rows, names[phase]), colour=colour)
            for phase, colour in _PHASES.items()
            if any(row.get(names[phase], 0.0) > 0 for row in rows)
        ],
        metrics=tuple(names.values()),
        layout="bars",
        unit=" s",
    )


def _pause(rows: Rows) -> Chart:
    return _lines(
        rows,
        "Pause for a weight update",
        "Seconds from the pause request until generation went on, on the engine that paused longest.",
        (("pause", "sync/pause_seconds"), ("whole update", "sync/total_seconds")),
        floor=0,
    )


def _fates(rows: Rows) -> Chart:
    return Chart(
        title="Fates",
        note="What became of the groups issued so far.",
        x=_column(rows, "step"),
        series=[
            Series(name=fate.replace("_", " "), values=_column(rows, f"fate/{fate}"), colour=colour)
            for fate, colour in _FATES.items()
            if any(row.get(f"fate/{fate}", 0) > 0 for row in rows)
        ],
        metrics=("fate/*",),
        layout="stack",
    )


def _lines(
    rows: Rows,
    title: str,
    note: str,
    lines: Sequence[tuple[str, str]],
    *,
    floor: float | None = None,
    ceiling: float | None = None,
    size: Literal["wide", "normal"] = "normal",
) -> Chart:
    return Chart(
        title=title,
        note=note,
        x=_column(rows, "step"),
        series=[
            Series(name=label, values=_column(rows, name), colour=i + 1)
            for i, (label, name) in enumerate(lines)
            if any(name in row for row in rows)
        ],
        metrics=[name for _, name in lines],
        floor=floor,
        ceiling=ceiling,
        size=size,
    )


def _column(rows: Rows, name: str) -> list[float]:
    return [row.get(name, math.nan) for row in rows]


def _lag_name(name: str, step: float) -> str:
    version = name.removeprefix("logprob_gap/version_")
    return f"{_LAG}{round(step) - 1 - int(version)}" if version != name and version.isdigit() else name


def _catalogue_order(name: str) -> tuple[int, str]:
    """Parts in the catalogue's order, unknown ones last."""
    parts = list(dict.fromkeys(known.split("/")[0] for known in METRICS))
    part = name.split("/")[0]
    return (parts.index(part) if part in parts else len(parts), name)


def _merge(rows: Rows) -> dict[str, float]:
    merged = {"step": rows[-1]["step"]}
    for name in dict.fromkeys(name for row in rows for name in row if name != "step"):
        values = [row[name] for row in rows if name in row and not math.isnan(row[name])]
        if not values:
            merged[name] = math.nan
        elif name.startswith("fate/"):
            merged[name] = values[-1]
        elif name.endswith("max"):
            merged[name] = max(values)
        elif name.endswith("min"):
            merged[name] = min(values)
        else:
            merged[name] = math.fsum(values) / len(values)
    return merged
