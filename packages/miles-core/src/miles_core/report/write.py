"""Puts the data of a page together: what the template shows, and what the script draws."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from miles_tito.errors import MilesError

from miles_core.durable.rundir import CONFIG
from miles_core.ledger import LEDGER
from miles_core.monitor.jsonl import METRICS_FILE
from miles_core.monitor.summary import format_seconds

from . import compare
from .charts import Chart, Series, by_lag, main_charts, other_charts, thin, warm_up_charts
from .page import format_number, percent, render, save
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
    ledger, tokenizer, timeline = run.ledger, load_tokenizer(run), run.timeline()
    rows = thin(by_lag(run.rows))
    charts = [*main_charts(rows), *warm_up_charts(thin(run.warm_up))] if rows else []
    more = other_charts(rows, drawn=charts)
    scores = score_charts(ledger.evaluations if ledger else [])
    strips: list[Any] = []
    episodes = [shown.to_data(tokenizer, strips) for shown in run.shown]
    discards = [
        {
            "totals": d.totals,
            "missing": d.missing,
            "episodes": [shown.to_data(tokenizer, strips) for shown in d.examples],
        }
        for d in (ledger.discards if ledger else [])
    ]
    return render(
        "run",
        title=run.path.name,
        data={
            "charts": {"main": _data(charts), "more": _data(more), "scores": _data(scores[:MOST_DATASETS])},
            "timeline": timeline,
            "strips": strips,
        },
        run=run,
        facts=_facts(run),
        figures=figures(run),
        more_datasets=len(scores) - MOST_DATASETS,
        timeline=timeline,
        episodes=episodes,
        discards=discards,
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
        data={"charts": {"by-step": _data(by_step), "by-time": _data(by_time)}},
        runs=runs,
        labels=labels,
        noise=compare.NOISE,
        lines=compare.lines(runs),
        unit=by_time[0].x_name if by_time else "",
        keys=compare.differing_keys(runs),
    )


def figures(run: RunData) -> list[tuple[str, str, str]]:
    """The numbers that answer whether the run did its job: name, value, note."""
    found: list[tuple[str, str, str]] = []
    summary = run.summary
    logged = [score for row in run.rows if math.isfinite(score := row.get("eval/score", math.nan))]
    before, after = logged[0] if len(logged) > 1 else None, logged[-1] if logged else None
    if summary is not None:
        before = before if summary.eval_before is None else summary.eval_before
        after = after if summary.eval_after is None else summary.eval_after
    if after is not None:
        gain = "" if before is None else f"{after - before:+.3f} from {before:.3f}"
        found.append(("held-out score", f"{after:.3f}", gain))
    gaps = [gap for row in run.rows if math.isfinite(gap := row.get("logprob_gap/same_version_max", math.nan))]
    if gaps:
        found.append(("same-version log-prob gap", format_number(max(gaps)), "maximum, every token"))
    if summary is not None:
        if summary.samples_per_s is not None:
            found.append(("samples a second", f"{summary.samples_per_s:.2f}", "episodes trained"))
        busy = {"engines": summary.engine_utilisation, "trainer": summary.trainer_utilisation}
        if known := {name: f"{value:.0%}" for name, value in busy.items() if value is not None}:
            found.append(("busy", " / ".join(known.values()), " / ".join(known)))
        if summary.fates:
            lost = f"{summary.num_lost} lost, {summary.fates.get('twice', 0)} twice"
            found.append(("groups issued", str(summary.fates.get("issued", 0)), lost))
    split, fates = run.time, run.ledger.fates if run.ledger else None
    if split is not None and split.ratio is not None:
        found.append(("effective training time", percent(split.ratio), f"of {format_seconds(split.wall)}"))
    if fates and fates.sampled:
        sampled = f"of {format_number(fates.sampled)} sampled"
        found.append(("wasted tokens", percent(fates.wasted / fates.sampled), sampled))
    return found


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
        scores = [by_step[step]["score"] for step in steps]
        name = "score, 95 % interval"
        series = [Series(name=name, x=steps, values=scores, low=low, high=high, colour=2, kind="points")]
        title = "Held-out score" if dataset == "eval" else f"Held-out score: {dataset}"
        charts.append(Chart(title=title, note=note, series=series))
    return charts


def _data(charts: Sequence[Chart]) -> list[dict[str, Any]]:
    return [chart.to_data() for chart in charts]


def _facts(run: RunData) -> list[str]:
    model = run.config.get("model")
    last = run.rows[-1] if run.rows else {}
    facts = [
        str(model.get("path") or model.get("builder") or "") if isinstance(model, Mapping) else "",
        f"{last['step']:g} steps" if last else "no steps yet",
        format_seconds(run.summary.seconds) if run.summary else "",
        time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(last["time"])) if "time" in last else "",
    ]
    return [fact for fact in facts if fact]


def _check(run_dir: Path) -> None:
    if not run_dir.is_dir():
        raise ReportError(f"{run_dir} is not a directory. Give the directory of a run, e.g. runs/quickstart.")
    if not any((run_dir / name).exists() for name in _OF_A_RUN):
        raise ReportError(f"{run_dir} is no run: it has none of {', '.join(_OF_A_RUN)}. Give the run's directory.")


def _save(path: Path, html: str) -> Path:
    try:
        return save(path, html)
    except OSError as error:
        raise ReportError(f"{path} cannot be written: {error}. Give another place with --out.") from error
