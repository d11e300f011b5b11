"""What one check found."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

Level = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the diagnosis."""

    check: str
    level: Level
    message: str
    """What is the case, with the numbers."""
    fix: str = ""
    """What to do, a command where there is one; empty where nothing is to be done."""


def to_text(findings: Sequence[Finding]) -> str:
    """One finding a line, its fix below it, and a verdict."""
    marks = {"ok": "ok  ", "warn": "warn", "fail": "FAIL"}
    width = max((len(finding.check) for finding in findings), default=0)
    lines: list[str] = []
    for finding in findings:
        lines.append(f"{marks[finding.level]}  {finding.check:<{width}}  {finding.message}")
        if finding.fix:
            lines.append(f"{'':<{width + 8}}fix: {finding.fix}")
    failed = sum(finding.level == "fail" for finding in findings)
    warned = sum(finding.level == "warn" for finding in findings)
    verdict = f"{failed} of {len(findings)} checks failed" if failed else "a run can start"
    return "\n".join([*lines, "", verdict + (f", {warned} warnings" if warned else "")])


def to_json(findings: Sequence[Finding]) -> str:
    """A list of objects with check, level, message and fix."""
    return json.dumps([asdict(finding) for finding in findings], indent=2)
