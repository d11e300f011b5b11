"""A JUnit file of pytest as a table: check, result, seconds."""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree


def table(report: Path) -> str:
    """Markdown rows in the order run, and the counts below."""
    rows: list[tuple[str, str, str]] = []
    for case in ElementTree.parse(report).iter("testcase"):
        result = next((child.tag for child in case if child.tag in ("failure", "error", "skipped")), "passed")
        name = case.get("name", "").removeprefix("test_").replace("_", " ")
        rows.append((name, result, f"{float(case.get('time', 0)):.1f}"))
    lines = ["| check | result | seconds |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows)]
    counts = [f"{sum(row[1] == kind for row in rows)} {kind}" for kind in ("passed", "failure", "error", "skipped")]
    return "\n".join([*lines, "", ", ".join(counts)])


if __name__ == "__main__":
    print(table(Path(sys.argv[1])))
