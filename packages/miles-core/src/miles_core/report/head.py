"""The head of the page: which run it is, how it stands, and the numbers that say whether it did its job."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

from miles_core.monitor.summary import format_seconds

from .chart import format_number
from .markup import percent
from .read import RunData
from .text import safe


def header(run: RunData) -> str:
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


def figures(run: RunData) -> str:
    """The numbers that answer whether the run did its job."""
    found: list[tuple[str, str, str]] = []
    before, after = _scores(run)
    if after is not None:
        gain = f"{after - before:+.3f} from {before:.3f}" if before is not None and before is not after else ""
        found.append(("held-out score", f"{after:.3f}", gain))
    gaps = [row["logprob_gap/same_version_max"] for row in run.rows if "logprob_gap/same_version_max" in row]
    if gaps := [gap for gap in gaps if math.isfinite(gap)]:
        found.append(("same-version log-prob gap", format_number(max(gaps)), "maximum, every token"))
    if (summary := run.summary) is not None:
        if summary.samples_per_s is not None:
            found.append(("samples a second", f"{summary.samples_per_s:.2f}", "episodes trained"))
        busy = {"engines": summary.engine_utilisation, "trainer": summary.trainer_utilisation}
        if known := {name: value for name, value in busy.items() if value is not None}:
            found.append(("busy", " / ".join(f"{v:.0%}" for v in known.values()), " / ".join(known)))
        if summary.fates:
            lost = f"{summary.num_lost} lost, {summary.fates.get('twice', 0)} twice"
            found.append(("groups issued", str(summary.fates.get("issued", 0)), lost))
    found += _ledger_figures(run)
    cells = (
        f"<li><span>{safe(name)}</span><strong>{safe(value)}</strong><small>{safe(note)}</small></li>"
        for name, value, note in found
    )
    fates = f'<p class="fates">{safe(run.summary.fates_line())}</p>' if run.summary and run.summary.fates else ""
    return f'<ul class="figures">{"".join(cells)}</ul>{fates}' if found else ""


def _ledger_figures(run: RunData) -> list[tuple[str, str, str]]:
    if run.book is None:
        return []
    found: list[tuple[str, str, str]] = []
    fates, split = run.book.fates, run.time()
    if split is not None and split.ratio is not None:
        found.append(("effective training time", percent(split.ratio), f"of {format_seconds(split.wall)}"))
    if fates.sampled:
        wasted = percent(fates.num_wasted / fates.sampled)
        found.append(("wasted tokens", wasted, f"of {format_number(fates.sampled)} sampled"))
    return found


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
