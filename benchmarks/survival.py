"""Does a run that is killed learn like one that is not, and how soon does it go on?

    python benchmarks/survival.py [--seeds 0 1] [--out runs/survival]    about five minutes a seed

Each seed runs the quick start twice: once left alone, once with `kill -9` of its trainer rank at step 9 and of its
driver at step 14, then `miles resume`. Prints a Markdown table: held-out scores with their standard errors, what the
ledger says, and the seconds from a start until the next step, split into what any start pays (processes, model,
engine) and what going on adds behind it.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

MILES = (sys.executable, "-m", "miles_core")
TRAINER_DIES, DRIVER_DIES = 9, 14
PATIENCE_S = 900.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--out", type=Path, default=Path("runs/survival"))
    arguments = parser.parse_args()
    print("| seed | run | held-out before | after | steps lost | lost / twice | engine ready | first step behind |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for seed in arguments.seeds:
        for name, play in (("left alone", leave_alone), ("killed twice", kill_twice)):
            print(line(seed, name, play(start(arguments.out, seed, name.replace(" ", "-")))), flush=True)


def start(out: Path, seed: int, name: str) -> tuple[Path, subprocess.Popen[bytes]]:
    """A quick start on its way, and its directory."""
    out = out.resolve()
    number = sum(path.name.startswith(f"{name}-{seed}") for path in out.glob("*"))
    path = out / (f"{name}-{seed}" if not number else f"{name}-{seed}-{number + 1}")
    words = ("quickstart", "--run.dir", str(out), "--run.name", f"{name}-{seed}", "--run.seed", str(seed))
    process = subprocess.Popen([*MILES, *words, "--checkpoint.every", "4", "--monitor.console", "off"])
    return path, process


def leave_alone(run: tuple[Path, subprocess.Popen[bytes]]) -> Path:
    path, process = run
    finish(process)
    return path


def kill_twice(run: tuple[Path, subprocess.Popen[bytes]]) -> Path:
    path, process = run
    wait_for_step(path, process, TRAINER_DIES)
    for child in psutil.Process(process.pid).children(recursive=True):
        with suppress(psutil.Error):
            if "ray::TrainerRank" in " ".join(child.cmdline()):
                child.kill()
    wait_for_step(path, process, DRIVER_DIES)
    process.kill()
    process.wait()
    finish(subprocess.Popen([*MILES, "resume", str(path)]))
    return path


def line(seed: int, name: str, path: Path) -> str:
    summary = json.loads((path / "summary.json").read_text())
    rows = steps_of(path)
    steps = [row["step"] for row in rows if "loss/total" in row]
    assert steps == list(range(1, len(steps) + 1)), f"{path} has the steps {steps}"
    lost = path / "metrics.discarded.jsonl"
    num_lost = lost.read_text().count('"loss/total"') if lost.exists() else 0
    scores = [row for row in rows if "eval/score" in row]
    before, after = (f"{row['eval/score']:.3f} ± {row['eval/stderr']:.3f}" for row in (scores[0], scores[-1]))
    fates = summary["fates"]
    num_gone = fates["issued"] - sum(fates[f] for f in ("trained", "filtered", "stale", "failed", "aborted"))
    times = seconds_to_go_on(path, rows)
    ready, step = ("-", "-") if times is None else (f"{seconds:.1f} s" for seconds in times)
    return f"| {seed} | {name} | {before} | {after} | {num_lost} | {num_gone} / {fates['twice']} | {ready} | {step} |"


def seconds_to_go_on(path: Path, rows: Sequence[Mapping[str, Any]]) -> tuple[float, float] | None:
    """Of the last start: until its engine was ready, and from there until its first step; None without a resume."""
    log = (path / "log" / "driver.log").read_text()
    with_time = re.compile(r"^([\d-]+ [\d:]+,\d+) \S+ (.*)$", re.MULTILINE)
    told = [(datetime.strptime(at, "%Y-%m-%d %H:%M:%S,%f").timestamp(), text) for at, text in with_time.findall(log)]
    ready = max(at for at, text in told if "engines at" in text)
    began = max((at for at, text in told if "goes on from step" in text), default=None)
    if began is None:
        return None
    first = min(row["time"] for row in rows if "loss/total" in row and row["time"] > ready)
    return ready - began, first - ready


def steps_of(path: Path) -> list[dict[str, Any]]:
    metrics = path / "metrics.jsonl"
    return [json.loads(row) for row in metrics.read_text().splitlines()] if metrics.exists() else []


def wait_for_step(path: Path, process: subprocess.Popen[bytes], step: int) -> None:
    end = time.monotonic() + PATIENCE_S
    while max((row["step"] for row in steps_of(path)), default=0) < step:
        if process.poll() is not None or time.monotonic() > end:
            raise SystemExit(f"{path} did not reach step {step}; see {path / 'log'}.")
        time.sleep(0.05)


def finish(process: subprocess.Popen[bytes]) -> None:
    if process.wait(PATIENCE_S):
        raise SystemExit(f"`miles` ended with status {process.returncode}.")


if __name__ == "__main__":
    main()
