"""Puts the data of a page together: what the template shows, and what the script draws."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from miles_tito.errors import MilesError
from miles_tito.shared.files import write_atomic

from miles_core.durable.ledger import LEDGER
from miles_core.durable.rundir import CONFIG
from miles_core.monitor.jsonl import METRICS_FILE

from . import compare
from .charts import FATE_COLOURS, Chart, Series, by_lag, main_charts, other_charts, thin
from .conversations import token_strip
from .page import render
from .run_data import RunData, load_tokenizer, read_run

REPORT_FILE = "report.html"
COMPARISON_FILE = "compare.html"
MOST_RUNS = 7
"""As many as there are colours."""
MOST_DATASETS = 12
"""Charts of held-out scores."""
_OF_A_RUN = (CONFIG, METRICS_FILE, LEDGER)


class ReportError(MilesError, ValueError):
    """There is no run to report on."""


def write(run_dir: Path, *, out: Path | None = None) -> Path:
    """Write `<run>/report.html`, or `out`, and return its path; works on a run that was killed or has not logged yet.

    Raises:
        ReportError: `run_dir` is not a directory, or the page cannot be written.
    """
    _check(run_dir)
    return _save(out or run_dir / REPORT_FILE, run_page(read_run(run_dir)))


def write_comparison(run_dirs: Sequence[Path], *, out: Path | None = None) -> tuple[Path, str]:
    """Write a page with the runs over one another; returns its path, and the numbers as text.

    Args:
        run_dirs: two to seven; differences are against the first.
        out: where the page goes; by default `compare.html` beside the first run.

    Raises:
        ReportError: one of them is not a directory, is given twice, or there are too many.
    """
    for number, run_dir in enumerate(run_dirs):
        _check(run_dir)
        if run_dir.resolve() in [other.resolve() for other in run_dirs[:number]]:
            raise ReportError(f"{run_dir} is given twice. Name each run once.")
    if not 2 <= len(run_dirs) <= MOST_RUNS:
        raise ReportError(f"{len(run_dirs)} runs are given; between 2 and {MOST_RUNS} can be told apart on one page.")
    runs = [read_run(run_dir) for run_dir in run_dirs]
    path = out or run_dirs[0].resolve().parent / COMPARISON_FILE
    return _save(path, comparison_page(runs)), compare.to_text(runs)


def run_page(run: RunData) -> str:
    """The report of one run."""
    timeline, tokenizer = run.timeline(), load_tokenizer(run)
    rows = thin(by_lag(run.rows))
    charts = main_charts(rows, warm_up=thin(run.warm_up)) if rows else []
    more = other_charts(rows, drawn=charts)
    scores = score_charts(run.ledger.evaluations)
    discarded = [shown for discard in run.ledger.discards for shown in discard.examples]
    shown = [trajectory for one in [*run.shown, *discarded] for trajectory in one.episode.trajectories]
    return render(
        "run",
        title=run.path.name,
        data={
            "charts": _data(main=charts, more=more, scores=scores[:MOST_DATASETS]),
            "timeline": timeline,
            "strips": [token_strip(trajectory, tokenizer) for trajectory in shown],
        },
        run=run,
        last=run.rows[-1] if run.rows else {},
        model=_model(run.config),
        scores=_scores(run),
        gap=max(run.logged(compare.GAP), default=None),
        colours=FATE_COLOURS,
        more_datasets=len(scores) - MOST_DATASETS,
        timeline=timeline,
        num_more=len(more),
        merged=len(run.rows) / max(len(rows), 1),
    )


def comparison_page(runs: Sequence[RunData]) -> str:
    """Runs over one another."""
    labels = compare.names(runs)
    by_step, by_time = compare.charts(runs, labels)
    return render(
        "comparison",
        title=" and ".join(labels),
        data={"charts": _data(**{"by-step": by_step, "by-time": by_time})},
        runs=runs,
        labels=labels,
        noise=compare.NOISE,
        lines=compare.lines(runs),
        unit=by_time[0].x_name if by_time else "",
        keys=compare.differing_keys(runs),
    )


def score_charts(evaluations: Sequence[Mapping[str, Any]]) -> list[Chart]:
    """The last score of each step on the surviving lineage, a chart for each dataset."""
    datasets: dict[str, dict[int, Mapping[str, Any]]] = {}
    for one in evaluations:
        if one["score"] is not None and one["is_live"]:
            datasets.setdefault(one["dataset"], {})[one["step"]] = one
    note = "Bars are 95 % confidence intervals, clustered by prompt."
    charts: list[Chart] = []
    for dataset, by_step in datasets.items():
        steps = sorted(by_step)
        low, high = zip(*(by_step[step]["interval"] or (math.nan, math.nan) for step in steps), strict=True)
        line = {"name": "score, 95 % interval", "colour": 2, "kind": "points"}
        series = Series(x=steps, values=[by_step[step]["score"] for step in steps], low=low, high=high, **line)
        title = "Held-out score" if dataset == "eval" else f"Held-out score: {dataset}"
        charts.append(Chart(title=title, note=note, series=[series]))
    return charts


def _data(**groups: Sequence[Chart]) -> dict[str, list[dict[str, Any]]]:
    return {name: [chart.to_data() for chart in charts] for name, charts in groups.items()}


def _model(config: Mapping[str, Any]) -> str:
    model = config.get("model")
    return str(model.get("path") or model.get("builder") or "") if isinstance(model, Mapping) else ""


def _scores(run: RunData) -> tuple[float | None, float | None]:
    """Held-out score before and after: the summary's, or the first and the last one logged."""
    logged = run.logged("eval/score")
    before, after = logged[0] if len(logged) > 1 else None, logged[-1] if logged else None
    if run.summary is not None:
        before = before if run.summary.eval_before is None else run.summary.eval_before
        after = after if run.summary.eval_after is None else run.summary.eval_after
    return before, after


def _check(run_dir: Path) -> None:
    if not run_dir.is_dir():
        raise ReportError(f"{run_dir} is not a directory. Give the directory of a run, e.g. runs/quickstart.")
    if not any((run_dir / name).exists() for name in _OF_A_RUN):
        raise ReportError(f"{run_dir} is no run: it has none of {', '.join(_OF_A_RUN)}. Give the run's directory.")


def _save(path: Path, html: str) -> Path:
    try:
        write_atomic(path, html)
    except OSError as error:
        raise ReportError(f"{path} cannot be written: {error}. Give another place with --out.") from error
    return path
