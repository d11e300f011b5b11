"""The catalogue of metric names, `names.toml`, and what each means.

Metrics outside the catalogue are recorded all the same and drawn in the report under "More".
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

METRICS: Final[Mapping[str, str]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
"""Name or family of names -> its meaning in a line."""


def describe(name: str) -> str | None:
    """The catalogue's line for `name`, None for a metric that it does not know."""
    if name in METRICS:
        return METRICS[name]
    families = sorted((n for n in METRICS if "*" in n), key=len, reverse=True)
    return next((METRICS[family] for family in families if _matches(family, name)), None)


def markdown_table() -> str:
    """The catalogue as a Markdown table."""
    return "\n".join(
        ["| metric | meaning |", "|---|---|", *(f"| `{name}` | {meaning} |" for name, meaning in METRICS.items())]
    )


def _matches(family: str, name: str) -> bool:
    start, end = family.split("*")
    return len(name) > len(start) + len(end) and name.startswith(start) and name.endswith(end)
