"""Text for people, on a page or a terminal: of models and users made safe to show, times, tables."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence
from datetime import datetime
from typing import Any

_HIDDEN = ("Cc", "Cf", "Co", "Cs", "Zl", "Zp")
"""Unicode categories that show nothing, or change how their neighbours are shown."""


def visible(text: str) -> str:
    """`text` with line ends, control, format and direction characters made visible."""
    return "".join(map(_visible, text))


def format_time(at: float) -> str:
    """Seconds since 1970 as `2026-03-04 05:06:07`, local time."""
    return datetime.fromtimestamp(at).strftime("%Y-%m-%d %H:%M:%S")


def format_seconds(seconds: float) -> str:
    """`42 s`, `3 min 5 s`, `2 h 10 min`."""
    if not math.isfinite(seconds):
        return "?"
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Columns side by side, numbers to the right."""
    cells = [[_cell(value) for value in row] for row in rows]
    widths = [max(len(name), *(len(row[i]) for row in cells), 0) for i, name in enumerate(columns)]
    right = [all(isinstance(row[i], int | float | None) for row in rows) for i in range(len(columns))]

    def line(values: Sequence[str]) -> str:
        padded = (v.rjust(w) if r else v.ljust(w) for v, w, r in zip(values, widths, right, strict=True))
        return ("  " + "  ".join(padded)).rstrip()

    return "\n".join([line(columns), *(line(row) for row in cells)])


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.6g}" if isinstance(value, float) else visible(str(value)).replace("\n", "")


def _visible(character: str) -> str:
    if character == "\n":
        return "⏎\n"
    return f"\\u{ord(character):04x}" if unicodedata.category(character) in _HIDDEN else character
