"""One run from its configuration to its last line.

run directory ─▶ Ray ─▶ RLRun or SftRun ─▶ summary ─▶ report
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Literal

from miles_core import report
from miles_core.cluster import cluster
from miles_core.config import Config, to_dict
from miles_core.durable.rundir import Kind, RunDir
from miles_core.errors import cause
from miles_core.monitor import Monitor, RunSummary, build_monitor
from miles_core.report.write import REPORT_FILE

from .rl import RLRun
from .sft import SftRun

logger = logging.getLogger(__name__)

EXIT_STATUS = {"finished": 0, "failed": 1, "interrupted": 130}


def main(config: Config, kind: Kind, run_dir: RunDir, *, accept_changes: bool = False) -> int:
    """Run to the end, print the summary, write the report; in a directory that was left early, go on from there.

    Args:
        accept_changes: go on although the model or the data is another than before.

    Returns:
        Exit status: 0 finished, 1 failed, 130 interrupted. No process of the run is left behind.
    """
    _log_to(run_dir.log / "driver.log")
    _share_import_path()
    monitor = build_monitor(
        config.monitor, run_dir=run_dir.path, total_steps=_steps(config, kind), run_config=to_dict(config)
    )
    return asyncio.run(_run(config, kind, run_dir, monitor, accept_changes=accept_changes))


async def _run(config: Config, kind: Kind, run_dir: RunDir, monitor: Monitor, *, accept_changes: bool) -> int:
    began = time.monotonic()
    run: RLRun | SftRun | None = None
    error: BaseException | None = None
    _cancel_on_signals()
    try:
        async with cluster(config.ray):
            _cancel_on_signals()  # Ray has put its own handlers in place of ours
            made = RLRun if kind == "rl" else SftRun
            run = made(config, run_dir=run_dir, monitor=monitor, accept_changes=accept_changes)
            await run.run()
    except (Exception, asyncio.CancelledError) as caught:
        error = cause(caught)
        logger.info("the run ended early", exc_info=caught)  # the whole trace is for the log file
    page = run_dir.path / REPORT_FILE
    known = {"steps": 0, "seconds": time.monotonic() - began, **(run.summary() if run else {})}
    summary = RunSummary(status=_status(error), error=_line(error), report=str(page), **known)
    monitor.finish(summary)
    report.write(run_dir.path)
    if config.monitor.console == "off":
        print("\n".join(summary.lines()), flush=True)
    if summary.status == "failed":
        print(f"{error}\nThe whole story: {run_dir.log}", file=sys.stderr)
    if summary.status != "finished" and summary.fates:
        print(f"It goes on where it stopped with: miles resume {run_dir.path}", file=sys.stderr)
    return EXIT_STATUS[summary.status]


def _steps(config: Config, kind: Kind) -> int:
    return config.run.steps if kind == "rl" else config.sft.steps


def _cancel_on_signals() -> None:
    """Ctrl-C and SIGTERM stop the run cleanly; a second one ends the process at once."""
    task = asyncio.current_task()
    assert task is not None, "called from a coroutine"
    loop = asyncio.get_running_loop()

    def stop(number: signal.Signals) -> None:
        for other in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(other)
            signal.signal(other, signal.SIG_DFL)
        task.cancel()
        with contextlib.suppress(OSError):  # the terminal may be gone
            print(f"\n{number.name}: stopping; once more to end at once", file=sys.stderr, flush=True)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)


def _share_import_path() -> None:
    """Let the processes of the run import what the driver can: the user's task lies beside the config file."""
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(path or os.getcwd() for path in sys.path))


def _log_to(path: Path) -> None:
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # a line for each probe of an engine would drown the rest
    console = logging.StreamHandler()
    console.setLevel(logging.WARNING)
    console.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    root.addHandler(console)


def _status(error: BaseException | None) -> Literal["finished", "interrupted", "failed"]:
    if error is None:
        return "finished"
    return "interrupted" if isinstance(error, asyncio.CancelledError) else "failed"


def _line(error: BaseException | None) -> str | None:
    if error is None or isinstance(error, asyncio.CancelledError):
        return None
    return f"{type(error).__name__}: {error}".strip().splitlines()[0]
