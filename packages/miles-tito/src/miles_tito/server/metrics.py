"""Counters of one session server, in Prometheus' text format."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

_HELP = {
    "requests_total": ("counter", "Requests by route and status."),
    "turns_total": ("counter", "Recorded turns by kind and finish reason."),
    "turns_not_recorded_total": ("counter", "Turns given up, by reason."),
    "prompt_tokens_total": ("counter", "Prompt tokens of recorded turns."),
    "cached_tokens_total": ("counter", "Prompt tokens that the engine had in its cache."),
    "completion_tokens_total": ("counter", "Sampled tokens of recorded turns."),
    "added_seconds": ("summary", "Time that a turn spends in this server before its call to the engine."),
    "engine_seconds": ("summary", "Time that a turn spends at the engine."),
    "sessions_opened_total": ("counter", "Sessions opened."),
    "sessions_expired_total": ("counter", "Sessions removed because they were unused."),
    "sessions": ("gauge", "Sessions held."),
    "turns": ("gauge", "Recorded turns held."),
    "turns_running": ("gauge", "Turns at the engine."),
    "tokens": ("gauge", "Tokens held."),
}


class Metrics:
    """Counters of one server; `GET /metrics` adds what the server holds and writes them out."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, tuple[tuple[str, str], ...]], float] = defaultdict(float)

    def add(self, name: str, value: float = 1, **labels: str) -> None:
        """Raise a counter."""
        self._counts[name, tuple(sorted(labels.items()))] += value

    def time(self, name: str, seconds: float) -> None:
        """One observation of a duration."""
        self.add(f"{name}_sum", seconds)
        self.add(f"{name}_count")

    def text(self, held: Mapping[str, float]) -> str:
        """All counters, and the gauges in `held`."""
        samples = {**self._counts, **{(name, ()): value for name, value in held.items()}}
        lines: list[str] = []
        for name, (kind, help_text) in _HELP.items():
            names = (f"{name}_sum", f"{name}_count") if kind == "summary" else (name,)
            rows = [(key, value) for key, value in samples.items() if key[0] in names]
            if rows:
                lines += [f"# HELP miles_tito_{name} {help_text}", f"# TYPE miles_tito_{name} {kind}"]
                lines += [f"miles_tito_{key}{_labels(labels)} {value:.10g}" for (key, labels), value in rows]
        return "\n".join([*lines, ""])


def _labels(labels: Iterable[tuple[str, str]]) -> str:
    pairs = [f'{key}="{_escaped(value)}"' for key, value in labels]
    return f"{{{','.join(pairs)}}}" if pairs else ""


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
