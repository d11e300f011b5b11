"""What a row of numbers should say in words: engines that restarted, pauses, what was skipped."""

from __future__ import annotations

from collections.abc import Mapping

from .summary import format_seconds

WAITED_S = 1.0
"""Shorter waits for a checkpoint are not worth a word."""


class Remarks:
    """Looks at each step and at what has grown since the last one."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}

    def about(self, metrics: Mapping[str, float]) -> list[str]:
        """The remarks on one row; most rows have none."""
        restarts, lost = self._grown("engine/restarts", metrics), self._grown("engine/swallowed", metrics)
        paused = self._grown("engine/paused_seconds", metrics)
        given_up = self._grown("engine/given_up", metrics)
        failed = metrics.get("sync/failed_engines", 0.0)
        waited = metrics.get("time/checkpoint_wait", 0.0)
        remarks = [
            f"paused {format_seconds(paused)}: no engine served" if paused > 0 else "",
            f"{_engines(restarts)} restarted" if restarts > 0 else "",
            f"{_engines(given_up)} given up" if given_up > 0 else "",
            f"{_engines(failed)} missed the weight update" if failed > 0 else "",
            f"{lost:.0f} {'request' if lost == 1 else 'requests'} lost by engines" if lost > 0 else "",
            "optimizer step skipped: its gradient was not finite" if metrics.get("optimizer/skipped", 0.0) > 0 else "",
            "evaluation without a score" if metrics.get("eval/skipped", 0.0) > 0 else "",
            f"waited {format_seconds(waited)} for the last checkpoint" if waited >= WAITED_S else "",
        ]
        return [remark for remark in remarks if remark]

    def _grown(self, name: str, metrics: Mapping[str, float]) -> float:
        """By how much a count has grown; one that fell has begun again."""
        now = metrics.get(name)
        if now is None:
            return 0.0
        last = self._last.get(name, 0.0)
        self._last[name] = now
        return now - last if now >= last else now


def _engines(number: float) -> str:
    return f"{number:.0f} {'engine' if number == 1 else 'engines'}"
