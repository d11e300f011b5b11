"""`compare.html`: runs over one another."""

from __future__ import annotations

from collections.abc import Sequence

from .chart import Chart
from .compare import NOISE, Line, differing_keys, lines, names
from .markup import card, percent, section, table
from .overlay import by_step, by_time
from .page import page
from .read import RunData
from .svg import draw
from .text import safe


def render(runs: Sequence[RunData]) -> str:
    labels = names(runs)
    keys = [[key, *values] for key, values in differing_keys(runs)]
    timed = by_time(runs, labels)
    unit = timed[0].x_name if timed else ""
    differ = "Keys whose values are not the same in all runs." if keys else "All runs have the same configuration."
    body = [
        _header(runs, labels),
        section(
            "Final numbers",
            f"Differences are against {labels[0]}. Green is better, red is worse; what differs by up to "
            f"{percent(NOISE)}, or has intervals that overlap, is neither.",
            card(_numbers(lines(runs), labels)),
        ),
        _charts("By step", "One line a run.", by_step(runs, labels)),
        _charts("By wall time", f"{unit.capitalize()} since the first start of each run.", timed),
        section("Configuration", differ, card(table(["key", *labels], keys)) if keys else " "),
        "<footer>Written by <code>miles report</code>. The page is complete: it loads nothing.</footer>",
    ]
    return page(" and ".join(labels), body)


def _header(runs: Sequence[RunData], labels: Sequence[str]) -> str:
    items: list[str] = []
    for i, (run, label) in enumerate(zip(runs, labels, strict=True)):
        steps = f"{run.rows[-1]['step']:g} steps" if run.rows else "no steps yet"
        status = run.summary.status if run.summary else "not finished"
        error = f": {run.summary.error}" if run.summary and run.summary.error else ""
        told = safe(f"{steps} · {status}{error}")
        items.append(f'<li class="c{i + 1}"><span>{safe(label)}</span><small>{told}</small></li>')
    notes = "".join(f'<p class="note">{safe(f"{run.path.name}: {note}")}</p>' for run in runs for note in run.notes)
    return (
        '<header><div><h1>Comparison</h1><button id="theme" title="light or dark">◐</button></div>'
        f'<ul class="runs">{"".join(items)}</ul>{notes}</header>'
    )


def _numbers(found: Sequence[Line], labels: Sequence[str]) -> str:
    if not found:
        return '<p class="nothing">None of these runs has logged a step.</p>'
    head = f'<th></th><th class="n">{safe(labels[0])}</th>' + "".join(
        f'<th class="n">{safe(label)}</th><th class="n">difference</th>' for label in labels[1:]
    )
    rows = "".join(f"<tr>{_cells(line, len(labels))}</tr>" for line in found)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def _cells(line: Line, count: int) -> str:
    cells = [f"<td>{safe(line.name)}</td>", f'<td class="n">{safe(line.text(0))}</td>']
    for i in range(1, count):
        cells.append(f'<td class="n">{safe(line.text(i))}</td>')
        cells.append(f'<td class="n {line.verdict(i)}">{safe(line.difference(i))}</td>')
    return "".join(cells)


def _charts(title: str, note: str, charts: Sequence[Chart]) -> str:
    drawn = "".join(draw(chart) for chart in charts)
    return section(title, note, f'<div class="charts">{drawn}</div>' if drawn else "")
