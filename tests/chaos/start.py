"""One start of a run, in a process of its own: from its first event to its end, its error, or its death."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from miles_core.config import Config
from miles_core.durable.rundir import RunDir
from miles_core.errors import cause
from miles_core.monitor import build_monitor
from miles_core.run import run_state
from miles_core.run.rl import RLRun

from .clock import StuckError, VirtualLoop, run
from .disk import KILLED, Disk, kill
from .faults import Fault
from .processes import scripted
from .record import Record
from .world import World

RECORD = "record.jsonl"
PATIENCE_S = 20_000.0
STOP_S = 60.0
"""Virtual seconds in which an interrupted run has to end."""
DISK_S = 0.05
MOMENTS = ("kill", "interrupt")
"""Kinds of faults whose occasions are events of the loop."""
WALL_S = 60
"""Seconds of the machine's own time after which a start is stuck inside one event."""

End = Literal["finished", "interrupted", "failed", "killed"]
Plant = Callable[[], None]
"""A bug, planted before the run is made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a start ended."""

    end: End
    error: str = ""
    trace: str = ""
    events: int = 0
    occasions: Mapping[str, int] = field(default_factory=dict[str, int])
    """For faults, of each kind."""
    problems: tuple[str, ...] = ()
    """What was wrong although it ended well."""


def play_start(
    config: Config, *, root: Path, seed: int, start: int, faults: Sequence[Fault], plant: Plant | None = None
) -> Ended:
    """Fork, play one start of the run in `root`, and wait for its end."""
    path = root / f"end-{start}.json"
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.alarm(WALL_S)
            ended = _play(config, root=root, seed=seed, start=start, faults=faults, plant=plant)
            path.write_text(json.dumps(asdict(ended)))
            status = 0
        except BaseException:
            path.with_suffix(".trace").write_text(traceback.format_exc())
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    if os.waitstatus_to_exitcode(status) == KILLED:
        return Ended(end="killed")
    if status == 0:
        fields = json.loads(path.read_text())
        return Ended(**{**fields, "problems": tuple(fields["problems"])})
    crash = path.with_suffix(".trace")
    text = crash.read_text() if crash.exists() else f"its process ended with status {status}"
    return Ended(end="failed", error=f"start {start} broke down: {text.strip().splitlines()[-1]}", trace=text)


def warm_up(config: Config) -> None:
    """Play a run without faults here, so that the processes to come share what it imports and caches."""
    with tempfile.TemporaryDirectory(prefix="miles-chaos-") as folder:
        root = Path(folder)
        record = Record(root / RECORD)
        record.new_weights(parent=-1, version=0)
        world = World(seed=0, start=0, faults=(), record=record)
        run_dir = open_run_dir(root)
        with closing(VirtualLoop()) as loop, scripted(world, config):
            _run(config, run_dir, loop, world)
        record.close()
    gc.collect()
    gc.freeze()


def _play(config: Config, *, root: Path, seed: int, start: int, faults: Sequence[Fault], plant: Plant | None) -> Ended:
    gc.disable()  # pages that nobody touches need not be copied
    record = Record(root / RECORD)
    world = World(seed=seed, start=start, faults=faults, record=record)
    run_dir = open_run_dir(root)
    record.add("start", start=start)
    if start == 0:
        record.new_weights(parent=-1, version=0)
    Disk(world, run_dir=str(run_dir.path)).install()
    run_state.environment = dict[str, Any]  # pyright: ignore[reportPrivateImportUsage]  # what is installed here takes longer to read than all the rest
    if plant is not None:
        plant()
    errors: list[str] = []
    loop = VirtualLoop(
        on_event=_moments(world, faults),
        disk_s=lambda: DISK_S * world.dice("disk", start, loop.events),
        patience_s=PATIENCE_S,
    )
    loop.set_exception_handler(lambda _, context: errors.append(_unseen(context)))
    with scripted(world, config):
        end, error = _run(config, run_dir, loop, world)
    num_open = sum(server.num_open for server in world.session_servers.values())
    if end == "finished" and num_open:
        errors.append(f"{num_open} sessions are still open.")
    gc.collect()  # an error that nobody looked at tells itself now
    return Ended(
        end=end,
        error="" if error is None else f"{type(error).__name__}: {error}",
        trace="" if error is None else "".join(traceback.format_exception(error)),
        events=loop.events,
        occasions={**world.occasions, **dict.fromkeys(MOMENTS, loop.events)},
        problems=tuple(errors),
    )


def _run(config: Config, run_dir: RunDir, loop: VirtualLoop, world: World) -> tuple[End, BaseException | None]:
    async def main() -> None:
        task = asyncio.current_task()
        assert task is not None
        world.main = task
        monitor = build_monitor(config.monitor, run_dir=run_dir.path, total_steps=config.run.steps)
        await RLRun(config, run_dir=run_dir, monitor=monitor).run()

    try:
        run(main(), loop)
    except asyncio.CancelledError:
        return "interrupted", None
    except StuckError:
        raise
    except Exception as error:
        return "failed", cause(error)
    return "finished", None


def _moments(world: World, faults: Sequence[Fault]) -> Callable[[int], None]:
    """What happens between two events, by the number of the second."""
    due = {f.nth: f.kind for f in faults if f.start == world.start and f.kind in MOMENTS}

    def on_event(number: int) -> None:
        kind = due.get(number)
        if kind is None:
            return
        world.record.add("fault", start=world.start, kind=kind, nth=number)
        if kind == "kill":
            kill(world, f"event {number}")
        elif world.main is not None:
            world.main.cancel()

    return on_event


def open_run_dir(root: Path) -> RunDir:
    run_dir = RunDir(path=root / "run")
    for folder in (run_dir.path, run_dir.trajectories, run_dir.checkpoints, run_dir.log):
        folder.mkdir(exist_ok=True)
    return run_dir


def _unseen(context: dict[str, Any]) -> str:
    error = context.get("exception")
    return f"Nobody saw: {context.get('message')}: {error!r}"
