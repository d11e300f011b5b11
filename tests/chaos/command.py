"""`make chaos`: runs that break in every way that their seed says, and what they must keep all the same."""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from miles_core.config import Config

from .faults import draw_faults
from .seed import Verdict, play, shrink
from .settings import draw_config, playable
from .start import warm_up


def run_seeds(seeds: Sequence[int], config: Config | None = None) -> Iterator[Verdict]:
    """The verdict on each seed; one that is broken comes with as few faults as break it.

    Args:
        config: the limits of every run; by default each seed draws its own.
    """
    logging.disable(logging.ERROR)  # what goes wrong here is meant to
    base = None if config is None else playable(config)
    warm_up(base or draw_config(0))
    occasions = None if base is None else play(0, base, ()).occasions
    for seed in seeds:
        settings = draw_config(seed) if base is None else base
        verdict = play(seed, settings, draw_faults(seed, occasions))
        yield verdict if verdict.is_sound else shrink(verdict, settings)


def play_seeds(first: int, count: int, config: Config | None, *, words: Sequence[str], as_json: bool) -> bool:
    """Play `count` seeds from `first` on and print what they showed; True if every invariant held."""
    began, broken, events, starts, faults = time.monotonic(), 0, 0, 0, Counter[str]()
    for verdict in run_seeds(range(first, first + count), config):
        broken += not verdict.is_sound
        events += verdict.events
        starts += verdict.starts
        faults.update(fault.kind for fault in verdict.happened)
        if as_json:
            print(json.dumps(_plain(verdict)), flush=True)
        elif count == 1 or not verdict.is_sound:
            print(describe(verdict, words), flush=True)
    seconds = time.monotonic() - began
    rate = count / max(seconds, 1e-9)
    print(
        f"{count} seeds, {starts} starts, {events:,} events, {faults.total()} faults of {len(faults)} kinds in "
        f"{seconds:.1f} s ({rate:.1f} seeds/s): "
        + (f"{broken} broke an invariant" if broken else "every invariant held"),
        file=sys.stderr,
    )
    return not broken


def describe(verdict: Verdict, words: Sequence[str] = ()) -> str:
    """The schedule of faults of one seed, and the first invariant that it broke."""
    happened = set(verdict.happened)
    schedule = [f"  {fault}{'' if fault in happened else ' (not reached)'}" for fault in verdict.faults]
    lines = [
        f"seed {verdict.seed}: {verdict.starts} starts, {verdict.events:,} events, {len(happened)} faults",
        *(schedule or ["  no fault"]),
    ]
    if verdict.is_sound:
        return "\n".join([*lines, "every invariant held"])
    first, *others = verdict.problems
    lines += ["broken: " + first.text, *(f"    and: {problem.text}" for problem in others[:4])]
    if verdict.story:
        lines += ["", verdict.story.rstrip(), ""]
    settings = f" CONFIG='{' '.join(words)}'" if words else ""
    return "\n".join([*lines, f"again: make chaos SEED={verdict.seed}{settings}"])


def _plain(verdict: Verdict) -> dict[str, Any]:
    return {"sound": verdict.is_sound, **dataclasses.asdict(verdict)}
