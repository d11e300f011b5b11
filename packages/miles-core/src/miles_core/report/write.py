"""Puts the page together."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from miles_tito.errors import MilesError

from miles_core.monitor.summary import format_seconds

from . import compare_page
from .chart import format_number
from .charts import by_lag, main_charts, other_charts, thin, warm_up_charts
from .compare import to_text
from .conversations import conversations_section
from .discards import discards_section
from .evaluations import evaluations_section
from .fates_section import fates_section
from .happenings import happenings_section
from .markup import percent
from .page import page, save
from .read import RunData, load_tokenizer, read_run
from .svg import draw
from .text import safe
from .time_section import time_section
from .timeline_section import timeline_section

REPORT_FILE = "report.html"
COMPARISON_FILE = "compare.html"
MOST_RUNS = 7
"""As many as there are colours."""


class ReportError(MilesError, ValueError):
    """There is no run to report on."""


def write(run_dir: Path, *, out: Path | None = None) -> Path:
    """Write `<run>/report.html`, or `out`, and return its path; works on a run that was killed or has not logged yet.

    Raises:
        ReportError: `run_dir` is not a directory, or the page cannot be written.
    """
    _check(run_dir)
    return _save(out or run_dir / REPORT_FILE, render(read_run(run_dir)))


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
    return _save(path, compare_page.render(runs)), to_text(runs)


def render(run: RunData) -> str:
    """The whole page."""
    tokenizer = load_tokenizer(run)
    charts, others = _charts(run)
    body = [
        _header(run),
        _figures(run),
        charts,
        *_course(run),
        conversations_section(run.shown, tokenizer),
        discards_section(run.book.discards, tokenizer) if run.book else "",
        others,
        _details(run),
    ]
    return page(run.path.name, body)


def _check(run_dir: Path) -> None:
    if not run_dir.is_dir():
        raise ReportError(f"{run_dir} is not a directory. Give the directory of a run, e.g. runs/quickstart.")


def _save(path: Path, html: str) -> Path:
    try:
        return save(path, html)
    except OSError as error:
        raise ReportError(f"{path} cannot be written: {error}. Give another place with --out.") from error


def _header(run: RunData) -> str:
    status = run.summary.status if run.summary else "not finished"
    facts = [
        _model(run.config),
        f"{run.rows[-1]['step']:g} steps" if run.rows else "no steps yet",
        format_seconds(run.summary.seconds) if run.summary else "",
        time.strftime("%Y-%m-%d %H:%M", time.gmtime(run.rows[-1]["time"])) + " UTC"
        if run.rows and "time" in run.rows[-1]
        else "",
    ]
    error = run.summary.error if run.summary else None
    notes = [*([error] if error else []), *run.notes]
    if run.summary is None:
        notes.append("This run has no summary: it is still going on, or it was killed.")
    told = "".join(f'<p class="note">{safe(note)}</p>' for note in notes)
    return (
        f"<header><div><h1>{safe(run.path.name)}</h1>"
        f'<span class="status {status.replace(" ", "-")}">{status}</span>'
        '<button id="theme" title="light or dark">◐</button></div>'
        f'<p class="facts">{" · ".join(safe(fact) for fact in facts if fact)}</p>'
        f"{told}</header>"
    )


def _figures(run: RunData) -> str:
    """The numbers that answer whether the run did its job."""
    figures: list[tuple[str, str, str]] = []
    before, after = _scores(run)
    if after is not None:
        gain = f"{after - before:+.3f} from {before:.3f}" if before is not None and before is not after else ""
        figures.append(("held-out score", f"{after:.3f}", gain))
    gaps = [row["logprob_gap/same_version_max"] for row in run.rows if "logprob_gap/same_version_max" in row]
    if gaps := [gap for gap in gaps if math.isfinite(gap)]:
        figures.append(("same-version log-prob gap", format_number(max(gaps)), "maximum, every token"))
    if (summary := run.summary) is not None:
        if summary.samples_per_s is not None:
            figures.append(("samples a second", f"{summary.samples_per_s:.2f}", "episodes trained"))
        busy = {"engines": summary.engine_utilisation, "trainer": summary.trainer_utilisation}
        if known := {name: value for name, value in busy.items() if value is not None}:
            figures.append(("busy", " / ".join(f"{v:.0%}" for v in known.values()), " / ".join(known)))
        if summary.fates:
            lost = f"{summary.num_lost} lost, {summary.fates.get('twice', 0)} twice"
            figures.append(("groups issued", str(summary.fates.get("issued", 0)), lost))
    figures += _ledger_figures(run)
    cells = (
        f"<li><span>{safe(name)}</span><strong>{safe(value)}</strong><small>{safe(note)}</small></li>"
        for name, value, note in figures
    )
    fates = f'<p class="fates">{safe(run.summary.fates_line())}</p>' if run.summary and run.summary.fates else ""
    return f'<ul class="figures">{"".join(cells)}</ul>{fates}' if figures else ""


def _ledger_figures(run: RunData) -> list[tuple[str, str, str]]:
    if run.book is None:
        return []
    figures: list[tuple[str, str, str]] = []
    fates, time = run.book.fates, run.time()
    if time is not None and time.ratio is not None:
        figures.append(("effective training time", percent(time.ratio), f"of {format_seconds(time.wall)}"))
    if fates.sampled:
        wasted = percent(fates.num_wasted / fates.sampled)
        figures.append(("wasted tokens", wasted, f"of {format_number(fates.sampled)} sampled"))
    return figures


def _course(run: RunData) -> list[str]:
    """What the ledger tells of the run."""
    timeline = timeline_section(run.timeline())
    if (book := run.book) is None:
        return [timeline]
    return [
        evaluations_section(book.evaluations),
        fates_section(book.fates),
        time_section(run.time()),
        timeline,
        happenings_section(book.happenings, begin=book.course.begin),
    ]


def _charts(run: RunData) -> tuple[str, str]:
    """The charts that every reader wants, and all others to open."""
    if not run.rows:
        return '<section><p class="nothing">No step has been logged yet.</p></section>', ""
    rows = thin(by_lag(run.rows))
    charts = [*main_charts(rows), *warm_up_charts(thin(run.warm_up))]
    others = other_charts(rows, drawn=charts)
    merged = f" Each point merges about {len(run.rows) / len(rows):.0f} steps." if len(rows) < len(run.rows) else ""
    more = (
        f"<details><summary>More metrics <small>{len(others)}.{merged}</small></summary>"
        f'<section class="charts many">{"".join(draw(chart) for chart in others)}</section></details>'
    )
    return f'<section class="charts">{"".join(draw(chart) for chart in charts)}</section>', more if others else ""


def _details(run: RunData) -> str:
    parts = [
        f"<details><summary>{name}</summary><pre>{escape(json.dumps(content, indent=2))}</pre></details>"
        for name, content in (("Configuration", run.config), ("Environment", run.environment))
        if content
    ]
    return (
        "".join(parts)
        + "<footer>Written by <code>miles report</code>. The page is complete: it loads nothing.</footer>"
    )


def _scores(run: RunData) -> tuple[float | None, float | None]:
    """Held-out score before and after: the summary's, or the first and the last one logged."""
    logged = [row["eval/score"] for row in run.rows if math.isfinite(row.get("eval/score", math.nan))]
    before = logged[0] if len(logged) > 1 else None
    after = logged[-1] if logged else None
    if run.summary is None:
        return before, after
    return (
        before if run.summary.eval_before is None else run.summary.eval_before,
        after if run.summary.eval_after is None else run.summary.eval_after,
    )


def _model(config: Mapping[str, Any]) -> str:
    model = config.get("model")
    if not isinstance(model, Mapping):
        return ""
    return str(model.get("path") or model.get("builder") or "")
