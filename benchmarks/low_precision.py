"""Does low precision learn as full precision does? The quick start in each format, beside three seeds without one.

Trainer and engines obey one recipe (`[quant]`); the engines run on the CPU and hold the values of the codes. Runs are
synchronous, so every token is scored by the weights that sampled it and the gap of its log-probs is numerics alone.
NVFP4 quantises experts, so every format runs on a mixture-of-experts variant of the quick start's model; those that
quantise dense layers run on the quick start's own too, with seeds of its own. All runs of a model start from one
warmed-up checkpoint.

A format passes if its score ends within the seeds' range, widened by two standard errors of the difference,
and its gap is below 1e-4.

    python benchmarks/low_precision.py [--steps 10] [--out runs/low-precision] [--only moe/nvfp4 dense/seed-0 …]

Runs that `--out` holds already are not repeated. Exit status 1 if a format does not pass.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from running import run_miles

SEEDS = (0, 1, 2)
FORMATS: Mapping[str, Sequence[str]] = {"moe": ("nvfp4", "fp8", "mxfp8", "int4"), "dense": ("fp8", "mxfp8", "int4")}
MAX_GAP = 1e-4


@dataclass(frozen=True, kw_only=True)
class Row:
    """What one run says of itself."""

    model: str
    name: str
    before: float
    after: float
    stderr: float
    gap_mean: float
    """Mean over steps of the mean |log p trainer - log p engine| of sampled tokens."""
    gap_max: float


def build_moe(out: Path, *, seed: int = 0) -> Path:
    """The quick start's model with four experts a layer, two a token, instead of its feed-forward layers."""
    import torch
    from miles_train.models.tiny import build_tiny
    from transformers import AutoConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

    build_tiny(out, seed=seed)
    shape = AutoConfig.from_pretrained(out).to_dict()
    for key in ("model_type", "architectures", "layer_types", "max_window_layers"):
        shape.pop(key, None)
    shape["tie_word_embeddings"] = False  # SGLang 0.5 ignores the tie in Qwen3-MoE and leaves the head as it was made
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True}
    torch.manual_seed(seed)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **experts, decoder_sparse_step=1, mlp_only_layers=[]))
    (Path(out) / "model.safetensors").unlink()
    model.float().save_pretrained(out)
    return Path(out)


BUILDERS: Mapping[str, Sequence[str]] = {"dense": (), "moe": ("--model.builder", "low_precision:build_moe")}


def main() -> int:
    arguments = _parse()
    out = arguments.out.resolve()
    rows: list[Row] = []
    print("| model | run | held-out before | after | mean gap | largest gap |\n|---|---|---|---|---|---|", flush=True)
    for model, formats in FORMATS.items():
        for name in (*(f"seed-{seed}" for seed in SEEDS), *formats):
            if arguments.only and f"{model}/{name}" not in arguments.only:
                continue
            rows.append(_run(model, name, out=out, steps=arguments.steps))
            print(_line(rows[-1]), flush=True)
    failed = [f"{row.model}/{row.name}: {why}" for row in rows if (why := _why_not(row, rows))]
    print("\n".join(failed) or "every format learns as full precision does", file=sys.stderr)
    return int(bool(failed))


def _run(model: str, name: str, *, out: Path, steps: int) -> Row:
    warm = _miles(("sft", "@", "quickstart", *BUILDERS[model]), out=out, name=f"{model}-warm-up")
    start = ("--model.path", str(warm / "checkpoints" / "final"), "--model.builder", "none", "--sft.steps", "0")
    seed = name.removeprefix("seed-") if name.startswith("seed-") else "0"
    quant = () if name.startswith("seed-") else ("--quant.format", name, "--quant.quantize-activations", "false")
    run = _miles(
        ("rl", "@", "quickstart", *start, "--run.seed", seed, "--train.seed", seed, "--run.steps", str(steps),
         "--rollout.max-staleness", "0", "--eval.num-prompts", "256", *quant),
        out=out,
        name=f"{model}-{name}",
    )  # fmt: skip
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    first, *_, last = [row for row in rows if "eval/score" in row]
    trained = [row for row in rows if "logprob_gap/same_version_mean" in row]
    assert len(trained) == steps, f"{run}: {len(trained)} of {steps} steps trained on tokens of their own version"
    return Row(
        model=model,
        name=name,
        before=first["eval/score"],
        after=last["eval/score"],
        stderr=last["eval/stderr"],
        gap_mean=sum(row["logprob_gap/same_version_mean"] for row in trained) / len(trained),
        gap_max=max(row["logprob_gap/same_version_max"] for row in trained),
    )


def _why_not(row: Row, rows: Sequence[Row]) -> str | None:
    """Why a format does not pass."""
    if row.gap_max > MAX_GAP:
        return f"the log-probs of trainer and engine are up to {row.gap_max:.1e} apart"
    seeds = [other for other in rows if other.model == row.model and other.name.startswith("seed-")]
    if row in seeds or not seeds:
        return None
    low = min(seed.after - 2 * math.hypot(seed.stderr, row.stderr) for seed in seeds)
    high = max(seed.after + 2 * math.hypot(seed.stderr, row.stderr) for seed in seeds)
    if low <= row.after <= high:
        return None
    return f"it ends at {row.after:.3f}, the seeds between {low:.3f} and {high:.3f}"


def _miles(words: Sequence[str], *, out: Path, name: str) -> Path:
    """Run the command unless it has been; its run directory. Its output goes to a file beside it."""
    folder = out / name
    summary = folder / "summary.json"
    if summary.exists() and json.loads(summary.read_text())["status"] == "finished":
        return folder
    if folder.exists():
        raise SystemExit(f"{folder} was left unfinished; remove it.")
    return run_miles(words, out=out, name=name)


def _line(row: Row) -> str:
    scores = f"{row.before:.3f} | {row.after:.3f} ± {row.stderr:.3f}"
    return f"| {row.model} | {row.name} | {scores} | {row.gap_mean:.1e} | {row.gap_max:.1e} |"


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("runs/low-precision"))
    parser.add_argument("--only", nargs="+", default=[], metavar="MODEL/RUN")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
