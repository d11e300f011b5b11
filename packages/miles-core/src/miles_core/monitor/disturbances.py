"""What a row of numbers means in words where something went wrong: restarts, pauses, what was skipped."""

from __future__ import annotations

from collections.abc import Mapping

from .summary import format_seconds

WAITED_S = 1.0
"""Shorter waits for a checkpoint are not worth a word."""


class Disturbances:
    """Words for each row of the console; it remembers the counts of the row before, and says by how much they grew."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}

    def of(self, metrics: Mapping[str, float]) -> list[str]:
        """The words for one row; most rows have none."""
        restarts, lost = self._grown("engine/restarts", metrics), self._grown("engine/swallowed", metrics)
        paused = self._grown("engine/paused_seconds", metrics)
        given_up = self._grown("engine/given_up", metrics)
        failed = metrics.get("sync/failed_engines", 0.0)
        waited = metrics.get("time/checkpoint_wait", 0.0)
        words = {
            f"paused {format_seconds(paused)}: no engine served": paused > 0,
            f"{_engines(restarts)} restarted": restarts > 0,
            f"{_engines(given_up)} given up": given_up > 0,
            f"{_engines(failed)} missed the weight update": failed > 0,
            f"{lost:.0f} {'request' if lost == 1 else 'requests'} lost by engines": lost > 0,
            "optimizer step skipped: its gradient was not finite": metrics.get("optimizer/skipped", 0.0) > 0,
            "evaluation without a score": metrics.get("eval/skipped", 0.0) > 0,
            f"waited {format_seconds(waited)} for the last checkpoint": waited >= WAITED_S,
        }
        return [text for text, is_so in words.items() if is_so]

    def _grown(self, name: str, metrics: Mapping[str, float]) -> float:
        """By how much a count has grown; one that fell has begun again."""
        if name not in metrics:
            return 0.0
        now, last = metrics[name], self._last.get(name, 0.0)
        self._last[name] = now
        return now - last if now >= last else now


def _engines(number: float) -> str:
    return f"{number:.0f} {'engine' if number == 1 else 'engines'}"
