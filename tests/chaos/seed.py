"""One seed: a run from its first start to its last, through every fault, and the check of what it left."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from miles_core.config import Config
from miles_core.durable.ledger import why
from miles_core.run.rl import MAX_TRAINER_RESTARTS
from miles_tito.errors import MilesError

from .check import check
from .environment import ScriptedEnv
from .evidence import Evidence, Problem
from .faults import KINDS, Fault
from .record import Record
from .settings import num_prompts
from .start import RECORD, Ended, Plant, open_run_dir, play_start

SHM = Path("/dev/shm")
SPARE_STARTS = 2
"""Starts without a fault of their own that a run may need besides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What became of one seed."""

    seed: int
    faults: tuple[Fault, ...]
    happened: tuple[Fault, ...]
    """Those of the faults that the run came to."""
    starts: int
    events: int
    occasions: Mapping[str, int]
    """For faults, of each kind, in the first start."""
    problems: tuple[Problem, ...]
    story: str = ""
    """What the ledger tells of the group that the first problem shows in."""

    @property
    def is_sound(self) -> bool:
        return not self.problems


def play(
    seed: int, config: Config, faults: Sequence[Fault], *, plant: Plant | None = None, keep: Path | None = None
) -> Verdict:
    """Play a run with `faults` to its end, and hold it against the invariants.

    Args:
        plant: a bug for every start.
        keep: leave the run's directory here instead of removing it.
    """
    root = Path(tempfile.mkdtemp(prefix="miles-chaos-", dir=SHM if SHM.is_dir() else None)) if keep is None else keep
    root.mkdir(parents=True, exist_ok=True)
    try:
        return _play(seed, config, faults, root, plant)
    finally:
        if keep is None:
            shutil.rmtree(root)


def _play(seed: int, config: Config, faults: Sequence[Fault], root: Path, plant: Plant | None) -> Verdict:
    record = Record(root / RECORD)
    ends: list[Ended] = []
    problems: list[Problem] = []
    most = max((fault.start for fault in faults), default=-1) + 1 + SPARE_STARTS
    while not problems and (not ends or ends[-1].end != "finished"):
        start = len(ends)
        if start == most:
            problems.append(
                Problem(text=f"The run has not finished after {start} starts: {ends[-1].error or ends[-1].end}")
            )
            break
        ends.append(play_start(config, root=root, seed=seed, start=start, faults=faults, plant=plant))
        problems += _of_end(ends[-1], start, record, ranks=config.train.ranks)
    evidence = Evidence(
        config=config,
        run_dir=open_run_dir(root),
        record=record,
        prompts=list(ScriptedEnv.prompts("train", num_prompts(config))),
    )
    if not problems:
        problems = check(evidence)
    happened = tuple(Fault(**fields) for _, fields in record.entries("fault"))
    record.close()
    return Verdict(
        seed=seed,
        faults=tuple(faults),
        happened=happened,
        starts=len(ends),
        events=sum(end.events for end in ends),
        occasions=ends[0].occasions,
        problems=tuple(replace(problem, text=problem.text.replace(str(root), "RUN")) for problem in problems),
        story=(_story(evidence, problems) or ends[-1].trace).replace(str(root), "RUN") if problems else "",
    )


def shrink(verdict: Verdict, config: Config, *, plant: Plant | None = None) -> Verdict:
    """The same failure with as few faults as needed: one after the other is left out while it still fails."""
    for fault in verdict.faults:
        fewer = tuple(other for other in verdict.faults if other is not fault)
        again = play(verdict.seed, config, fewer, plant=plant)
        if not again.is_sound:
            verdict = again
    return verdict


def _of_end(ended: Ended, start: int, record: Record, *, ranks: int) -> list[Problem]:
    """What is wrong with how a start ended; a fault may end one, and nothing else may."""
    problems = [Problem(text=f"Start {start}: {text}") for text in ended.problems]
    if ended.end == "failed":
        faults = [fault for _, fields in record.entries("fault") if (fault := Fault(**fields)).start == start]
        if not _explains(faults, ended.error, ranks=ranks):
            problems.insert(0, Problem(text=f"Start {start} ended by itself: {ended.error}"))
    return problems


def _explains(faults: Sequence[Fault], error: str, *, ranks: int) -> bool:
    """Whether these faults of one start may end it with this error."""
    name = error.split(":")[0]
    if name == "TrainerLost":
        lost = [fault for fault in faults if fault.kind.startswith("trainer_lost")]
        is_in_a_row = len(lost) > MAX_TRAINER_RESTARTS
        return is_in_a_row or any(fault.nth <= ranks for fault in lost)  # before there was anything to go on from
    return any(KINDS[fault.kind].ends_with == name for fault in faults)


def _story(run: Evidence, problems: Sequence[Problem]) -> str:
    """What became of the group that a problem shows in, in the words of `miles why`."""
    named = (problem.group or next(iter(re.findall(r"\bg\d{6}\b", problem.text)), None) for problem in problems)
    group = next((name for name in named if name is not None), None)
    if group is None or not run.run_dir.ledger.exists():
        return ""
    try:
        return why(run.run_dir.ledger, group)
    except MilesError as error:
        return str(error)
