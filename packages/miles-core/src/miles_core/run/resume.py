"""`miles resume RUN`: a run goes on, with its own configuration and what the user changes of it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from miles_core.config import Config, to_dict
from miles_core.config.load import Loaded, load_config
from miles_core.config.plugins import check_plugins
from miles_core.durable import rundir
from miles_core.durable.checkpoints import Checkpoints
from miles_core.durable.fingerprint import compare
from miles_core.durable.rundir import Kind, RunDir

from .changes import ResumeError, refuse
from .command import main


def resume(
    path: Path,
    words: Sequence[str] = (),
    *,
    steps: int | None = None,
    more: int | None = None,
    accept_changes: bool = False,
) -> int:
    """Go on with the run in `path`; returns the exit status of `command.main`.

    Args:
        words: settings laid over the stored configuration, as on the command line.
        steps: train up to this step in all.
        more: train this many steps beyond the newest committed one.
        accept_changes: go on although something that the run depends on has changed.

    Raises:
        RunDirError: `path` is no run, what it says about itself is damaged, or a process runs it.
        ConfigError: a setting is wrong.
        ResumeError: there is nothing left to do, or something changed that the run depends on.
    """
    run_dir = rundir.open_run(path)
    facts = run_dir.facts()
    stored = run_dir.config()
    loaded = load_config(words, kind=facts.kind, stored=stored)
    for warning in loaded.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    config = _with_steps(loaded, facts.kind, run_dir, steps=steps, more=more)
    changes = compare({"config": stored}, {"config": to_dict(config)})
    refuse(changes, accept_changes=accept_changes)
    for sentence in changes.allowed:
        print(f"changed: {sentence}", file=sys.stderr)
    sys.path[:0] = list(dict.fromkeys([*loaded.import_paths, *facts.import_paths]))
    check_plugins(config, facts.kind, sources=loaded.sources)
    rundir.write_config(run_dir, to_dict(config))
    return main(config, facts.kind, run_dir, accept_changes=accept_changes)


def _with_steps(loaded: Loaded, kind: Kind, run_dir: RunDir, *, steps: int | None, more: int | None) -> Config:
    """The configuration with its new last step, which lies behind the newest committed one."""
    config, key = loaded.config, ("run" if kind == "rl" else "sft", "steps")
    found = Checkpoints(run_dir.checkpoints).latest()
    done = found.step if found else 0
    asked = [f"--{name} {value}" for name, value in (("steps", steps), ("more", more)) if value is not None]
    if asked and loaded.sources.get(key, rundir.CONFIG) != rundir.CONFIG:
        asked.append(f"`{'.'.join(key)}` of {loaded.sources[key]}")
    if len(asked) > 1:
        raise ResumeError(f"{' and '.join(asked)} contradict each other; say one of them.")
    section = config.run if kind == "rl" else config.sft
    wanted = done + more if more is not None else steps if steps is not None else section.steps
    if wanted <= done:
        raise ResumeError(
            f"{run_dir.path} is at step {done} and is to go to step {wanted}: nothing is left to do. Say --more N for "
            f"N further steps, or --steps N with N above {done}."
        )
    if kind == "rl":
        return replace(config, run=replace(config.run, steps=wanted))
    return replace(config, sft=replace(config.sft, steps=wanted))
