"""Is it learning? The quick start over three seeds, beside two controls that must stay flat.

    real       GRPO as the recipe has it
    lr = 0     the same loop, whose optimizer moves nothing
    shuffled   the same rewards, dealt at random among the siblings of each group: all else equal, no signal

Every run of a seed starts from the same warmed-up model. Prints a Markdown table of held-out scores before and
after, with the standard error of their difference.

    python benchmarks/learning.py [--seeds 0 1 2] [--steps 40] [--out runs/learning]
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from miles_rollout.advantages import AdvantageRows, Rewards, grpo
from running import run_miles

RUNS: Mapping[str, Sequence[str]] = {
    "real": (),
    "lr = 0": ("--train.optimizer.lr", "0"),
    "shuffled": ("--rollout.advantage", "learning:shuffled_grpo"),
}


def shuffled_grpo(rewards_BG: Rewards) -> AdvantageRows:
    """GRPO on rewards dealt at random among siblings: an advantage that says nothing about its episode."""
    rng = random.Random(repr(rewards_BG))
    dealt: list[list[float | None]] = []
    for rewards_G in rewards_BG:
        hand = [reward for reward in rewards_G if reward is not None]
        rng.shuffle(hand)
        dealt.append([None if reward is None else hand.pop() for reward in rewards_G])
    return grpo(dealt)


def main() -> None:
    arguments = _parse()
    out = arguments.out.resolve()
    rows: list[dict[str, Any]] = []
    print("| seed | run | held-out before | after | gain | loop time |\n|---|---|---|---|---|---|", flush=True)
    for seed in arguments.seeds:
        warm = _warm_up(seed, out)
        for name, words in RUNS.items():
            row = {"seed": seed, "run": name, **_run(seed, name, words, model=warm, out=out, steps=arguments.steps)}
            rows.append(row)
            print(_line(row), flush=True)
    (out / "learning.json").write_text(json.dumps(rows, indent=2) + "\n")


def _warm_up(seed: int, out: Path) -> Path:
    """The model that every run of this seed starts from."""
    run = run_miles(
        ("sft", "@", "quickstart", *_seeded(seed), "--sft.data-args.seed", str(seed)), out=out, name=f"warm-up-{seed}"
    )
    return run / "checkpoints" / "final"


def _run(seed: int, name: str, words: Sequence[str], *, model: Path, out: Path, steps: int) -> dict[str, float]:
    began = time.monotonic()
    start = ("--model.path", str(model), "--model.builder", "none", "--model.builder-args", "{}", "--sft.steps", "0")
    run = run_miles(
        ("rl", "@", "quickstart", "--run.seed", str(seed), *start, "--run.steps", str(steps), *words),
        out=out,
        name=f"{name.replace(' ', '')}-{seed}",
    )
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    first, *_, last = [row for row in rows if "eval/score" in row]
    return {
        "before": first["eval/score"],
        "after": last["eval/score"],
        "stderr": math.hypot(first["eval/stderr"], last["eval/stderr"]),
        "loop_s": json.loads((run / "summary.json").read_text())["seconds"],
        "wall_s": time.monotonic() - began,
    }


def _seeded(seed: int) -> Sequence[str]:
    return ("--run.seed", str(seed), "--model.builder-args.seed", str(seed))


def _line(row: Mapping[str, Any]) -> str:
    scores = f"{row['before']:.3f} | {row['after']:.3f} | {row['after'] - row['before']:+.3f} ± {row['stderr']:.3f}"
    return f"| {row['seed']} | {row['run']} | {scores} | {row['loop_s']:.0f} s |"


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", type=Path, default=Path("runs/learning"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
