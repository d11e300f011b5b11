"""Puts the page together."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path

from miles_tito.errors import MilesError

from miles_core.durable.rundir import CONFIG
from miles_core.ledger import LEDGER
from miles_core.monitor.jsonl import METRICS_FILE

from . import compare_page
from .charts import by_lag, main_charts, other_charts, thin, warm_up_charts
from .compare import to_text
from .conversations import conversations_section
from .discards import discards_section
from .evaluations import evaluations_section
from .fates_section import fates_section
from .happenings import happenings_section
from .head import figures, header
from .page import page, save
from .read import RunData, load_tokenizer, read_run
from .svg import draw
from .time_section import time_section
from .timeline_section import timeline_section

REPORT_FILE = "report.html"
COMPARISON_FILE = "compare.html"
MOST_RUNS = 7
"""As many as there are colours."""
_OF_A_RUN = (CONFIG, METRICS_FILE, LEDGER)


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
        header(run),
        figures(run),
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
    if not any((run_dir / name).exists() for name in _OF_A_RUN):
        raise ReportError(f"{run_dir} is no run: it has none of {', '.join(_OF_A_RUN)}. Give the run's directory.")


def _save(path: Path, html: str) -> Path:
    try:
        return save(path, html)
    except OSError as error:
        raise ReportError(f"{path} cannot be written: {error}. Give another place with --out.") from error


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
