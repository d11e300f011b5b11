"""What the checks found, as text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

Level = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What one check of `miles doctor` found: a line of its diagnosis."""

    check: str
    level: Level
    message: str
    """What is the case, with the numbers."""
    fix: str = ""
    """What to do, a command where there is one; empty where nothing is to be done."""


Finding = CheckResult
"""An older name."""


def to_text(results: Sequence[CheckResult]) -> str:
    """One result a line, its fix below it, and a verdict."""
    marks = {"ok": "ok  ", "warn": "warn", "fail": "FAIL"}
    width = max((len(result.check) for result in results), default=0)
    lines: list[str] = []
    for result in results:
        lines.append(f"{marks[result.level]}  {result.check:<{width}}  {result.message}")
        if result.fix:
            lines.append(f"{'':<{width + 8}}fix: {result.fix}")
    failed = sum(result.level == "fail" for result in results)
    warned = sum(result.level == "warn" for result in results)
    verdict = f"{failed} of {len(results)} checks failed" if failed else "a run can start"
    return "\n".join([*lines, "", verdict + (f", {warned} warnings" if warned else "")])


def to_json(results: Sequence[CheckResult]) -> str:
    """A list of objects with check, level, message and fix."""
    return json.dumps([asdict(result) for result in results], indent=2)
