"""The run on the terminal: one row a step, a progress line with the time left on a TTY, then the summary."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from miles_core.text import format_seconds

from .base import Monitor, MonitoredRun, RunSummary

HEADER_EVERY = 20
WAITED_S = 1.0
"""Shorter waits for a checkpoint are not worth a word."""


@dataclass(frozen=True, slots=True)
class Column:
    """One number of a row."""

    title: str
    width: int
    style: str
    show: Callable[[Mapping[str, float]], str]


class ConsoleMonitor(Monitor):
    """One row a step for the user: drawn by rich on a terminal, plain lines elsewhere (a log file, CI)."""

    def __init__(
        self,
        run: MonitoredRun,
        *,
        mode: Literal["auto", "rich", "plain"] = "auto",
        file: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = Console(file=file, highlight=False, force_terminal=True if mode == "rich" else None)
        self._plain = mode == "plain" or (mode == "auto" and not self._console.is_terminal)
        self._total = run.total_steps
        self._eta = Eta(run.total_steps, clock=clock)
        self._rows = 0
        self._disturbances = Disturbances()
        self._progress: Progress | None = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        left = self._eta.update(step)
        disturbances = self._disturbances.of(metrics)
        if self._plain:
            row = [plain_row(step, self._total, metrics, left), *disturbances]
            self._console.print(" | ".join(row), soft_wrap=True)
            return
        if self._progress is None:
            self._progress = self._start_progress()
        if self._rows % HEADER_EVERY == 0:
            self._console.print(_header())
        self._rows += 1
        self._console.print(_row(step, metrics))
        for words in disturbances:
            self._console.print(Text(f"{'':>5}  {words}", style="yellow"), soft_wrap=True)
        self._progress.update(TaskID(0), completed=step, left=f"{format_seconds(left)} left")

    def log_late(self, step: int, metrics: Mapping[str, float]) -> None:
        lag = metrics.get("eval/lag_steps", 0)
        later = [f"{lag:.0f} steps later"] if lag else []
        row = [plain_row(step, self._total, metrics, math.nan), *later, *self._disturbances.of(metrics)]
        self._console.print(" | ".join(row), soft_wrap=True)

    def rewind(self, step: int) -> None:
        self._eta.restart()
        if step:
            self._console.print(f"going on from step {step}", soft_wrap=True)

    def finish(self, summary: RunSummary) -> None:
        if self._progress is not None:
            self._progress.stop()
        styles = {"finished": "bold green", "interrupted": "bold yellow", "failed": "bold red"}
        first, *others = summary.lines()
        self._console.print(Text(first, "" if self._plain else styles[summary.status]), soft_wrap=True)
        for line in others:
            self._console.print(Text(line), soft_wrap=True)

    def _start_progress(self) -> Progress:
        progress = Progress(
            TextColumn("  "),
            BarColumn(bar_width=32, complete_style="cyan", finished_style="green"),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("[dim]{task.fields[left]}"),
            console=self._console,
            transient=True,
        )
        progress.add_task("steps", total=self._total, left="")
        progress.start()
        return progress


class Eta:
    """Seconds until the last step, from the pace since the first row (whose start-up would mislead)."""

    def __init__(self, total_steps: int, *, clock: Callable[[], float]) -> None:
        self._total = total_steps
        self._clock = clock
        self._first: tuple[int, float] | None = None

    def restart(self) -> None:
        """The next row counts as the first."""
        self._first = None

    def update(self, step: int) -> float:
        """Seconds left after `step`; nan until two steps have been seen."""
        now = self._clock()
        if self._first is None:
            self._first = (step, now)
        first_step, first_time = self._first
        if step == first_step:
            return math.nan
        return (now - first_time) / (step - first_step) * max(self._total - step, 0)


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


def plain_row(step: int, total: int, metrics: Mapping[str, float], left: float) -> str:
    """`step 12/40 | reward 0.531 ± 0.310 | …`, columns without a value left out."""
    parts = [f"step {step}/{total}"]
    parts += [f"{column.title} {text}" for column in COLUMNS if (text := column.show(metrics)) != "-"]
    if math.isfinite(left):
        parts.append(f"{format_seconds(left)} left")
    return " | ".join(parts)


def _header() -> Text:
    text = Text(f"{'step':>5}", style="dim")
    for column in COLUMNS:
        text.append(f"  {column.title:>{column.width}}")
    return text


def _row(step: int, metrics: Mapping[str, float]) -> Text:
    text = Text(f"{step:>5}")
    for column in COLUMNS:
        text.append(f"  {column.show(metrics):>{column.width}}", style=column.style)
    return text


def _value(name: str, form: str) -> Callable[[Mapping[str, float]], str]:
    def show(metrics: Mapping[str, float]) -> str:
        value = metrics.get(name, math.nan)
        return "-" if math.isnan(value) else format(value, form)

    return show


def _reward(metrics: Mapping[str, float]) -> str:
    mean, std = (metrics.get(f"reward/{part}", math.nan) for part in ("mean", "std"))
    if math.isnan(mean):
        return "-"
    return f"{mean:.3f}" if math.isnan(std) else f"{mean:.3f} ± {std:.2f}"


def _share(name: str) -> Callable[[Mapping[str, float]], str]:
    def show(metrics: Mapping[str, float]) -> str:
        part, step = metrics.get(name, math.nan), metrics.get("time/step", math.nan)
        return f"{part / step:.0%}" if step > 0 and not math.isnan(part) else "-"

    return show


def _engines(number: float) -> str:
    return f"{number:.0f} {'engine' if number == 1 else 'engines'}"


COLUMNS = (
    Column("reward", 14, "bold", _reward),
    Column("held-out", 8, "bold green", _value("eval/score", ".3f")),
    Column("loss", 9, "", _value("loss/total", ".4f")),
    Column("tokens", 7, "", _value("episode/tokens", ".1f")),
    Column("stale", 5, "", _value("staleness/mean", ".2f")),
    Column("gap", 8, "", _value("logprob_gap/max", ".1e")),
    Column("tok/s", 8, "cyan", _value("engine/tokens_per_s", ",.0f")),
    Column("wait", 5, "dim", _share("time/take_wait")),
    Column("train", 5, "dim", _share("time/train")),
    Column("sync", 5, "dim", _share("time/sync")),
    Column("s/step", 7, "", _value("time/step", ".2f")),
)
