"""Pieces that sections are made of: headings, tables, bars. Everything given here is text, and hostile."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from .text import safe


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One part of a whole."""

    name: str
    value: float
    text: str
    """The value as people read it."""
    colour: int
    """1 to 8, a colour of the style sheet."""


def section(title: str, note: str, *content: str, kind: str = "part") -> str:
    """A part of the page under a heading; empty where it has no content."""
    inner = "".join(content)
    if not inner:
        return ""
    head = f'<h2>{safe(title)}</h2><p class="lead">{safe(note)}</p>'
    return f'<section class="{safe(kind)}">{head}{inner}</section>'


def card(*content: str) -> str:
    inner = "".join(content)
    return f'<div class="card">{inner}</div>' if inner else ""


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: Collection[int] = ()) -> str:
    """Text in columns.

    Args:
        numbers: the columns that are flush right.
    """
    if not rows:
        return ""

    def line(tag: str, cells: Sequence[str]) -> str:
        kinds = (' class="n"' if i in numbers else "" for i in range(len(cells)))
        marked = (f"<{tag}{kind}>{safe(cell)}</{tag}>" for cell, kind in zip(cells, kinds, strict=True))
        return f"<tr>{''.join(marked)}</tr>"

    body = "".join(line("td", row) for row in rows)
    return f'<div class="scroll"><table><thead>{line("th", columns)}</thead><tbody>{body}</tbody></table></div>'


def shares(parts: Sequence[Share]) -> str:
    """One bar cut into parts, and a legend with their values."""
    total = sum(part.value for part in parts)
    if total <= 0:
        return ""
    bar = "".join(
        f'<i class="c{part.colour}" style="width:{100 * part.value / total:.3f}%"></i>' for part in parts if part.value
    )
    legend = "".join(
        f'<li class="c{part.colour}"><span>{safe(part.name)}</span><b>{safe(part.text)}</b>'
        f"<small>{percent(part.value / total)}</small></li>"
        for part in parts
    )
    return f'<div class="bar">{bar}</div><ul class="legend">{legend}</ul>'


def steps_down(rows: Sequence[tuple[Share, bool]], *, total: float) -> str:
    """A waterfall: each bar begins where the one before it ended. A row marked True is a part of the row above it."""
    lines: list[str] = []
    level = inner = 0.0
    for share, is_part in rows:
        begin = inner if is_part else level
        width = 100 * share.value / total if total > 0 else 0.0
        offset = 100 * begin / total if total > 0 else 0.0
        inner = begin + share.value if is_part else level
        if not is_part:
            level += share.value
        lines.append(
            f'<div class="fall{" sub" if is_part else ""}"><span>{safe(share.name)}</span>'
            f'<div><i class="c{share.colour}" style="left:{offset:.3f}%;width:{max(width, 0.15):.3f}%"></i></div>'
            f"<b>{safe(share.text)}</b></div>"
        )
    return f'<div class="falls">{"".join(lines)}</div>' if lines else ""


def percent(share: float) -> str:
    """`0 %`, `<0.1 %`, `3.1 %`, `97 %`."""
    value = 100 * share
    if value == 0 or value >= 10:
        return f"{value:.0f} %"
    return f"{value:.1f} %" if value >= 0.1 else "<0.1 %"


def count(number: float) -> str:
    """`12 345`, grouped with thin spaces."""
    return f"{number:,.0f}".replace(",", "\N{NARROW NO-BREAK SPACE}")


def plural(number: int, one: str, many: str = "") -> str:
    return f"{count(number)} {one if number == 1 else many or one + 's'}"
