"""Consecutive optimizer steps of a real model, as the codec benchmark compares them.

    python benchmarks/weightsync_steps.py          makes them: two to eight minutes

SmolLM2-135M on the sources of this repository: float32 masters, Adam, 256 tokens a step. For every learning rate the
masters after eight and after nine steps are kept, when the moments of Adam have settled.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).parents[1]
FOLDER = Path(tempfile.gettempdir()) / "miles-optimizer-steps"
LEARNING_RATES = (1e-6, 1e-5)
WARM_UP = 8
_ROWS, _TOKENS = 2, 128


@dataclass(frozen=True, kw_only=True)
class Step:
    """The masters before and after one optimizer step."""

    rate: float
    old: np.ndarray
    """[N] float32, all parameters one after another."""
    new: np.ndarray
    shapes: Sequence[tuple[int, ...]]
    """Of the parameters, in that order."""


def steps(folder: Path, rates: Sequence[float] = LEARNING_RATES) -> Iterator[Step]:
    """One step for every learning rate; trained on first use, then read back."""
    for rate in rates:
        path = folder / f"smollm2-lr{rate:.0e}.npy"
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            temporary = path.with_suffix(".tmp.npy")
            np.save(temporary, np.stack(train(rate)))
            temporary.rename(path)
        versions = np.load(path, mmap_mode="r")
        yield Step(rate=rate, old=versions[0], new=versions[1], shapes=_shapes())


def rehearsal() -> Iterator[Step]:
    """A small made-up step, to see that a benchmark works."""
    rng = np.random.default_rng(0)
    old = (rng.standard_normal(2048 * 576) * 0.05).astype(np.float32)
    new = old + (1e-6 * rng.standard_normal(old.size)).astype(np.float32)
    yield Step(rate=1e-6, old=old, new=new, shapes=[(2048, 576)])


def train(rate: float) -> tuple[np.ndarray, np.ndarray]:
    """The masters after `WARM_UP` and `WARM_UP + 1` steps."""
    from miles_train.models.smollm2 import fetch_smollm2
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    model_folder = fetch_smollm2()
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    text = "\n".join(path.read_text() for path in sorted(ROOT.glob("packages/*/src/**/*.py"))[:20])
    ids = AutoTokenizer.from_pretrained(model_folder)(text, return_tensors="pt").input_ids[0]
    optimizer = torch.optim.Adam(model.parameters(), lr=rate, betas=(0.9, 0.999))
    before = np.empty(0, np.float32)
    for step in range(WARM_UP + 1):
        if step == WARM_UP:
            before = _flat(model)
        at = step * _ROWS * _TOKENS
        batch = ids[at : at + _ROWS * _TOKENS].view(_ROWS, _TOKENS)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"lr {rate:.0e} step {step}: loss {loss.item():.3f}", flush=True)
    return before, _flat(model)


def _flat(model: torch.nn.Module) -> np.ndarray:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).numpy()


def _shapes() -> list[tuple[int, ...]]:
    from miles_train.models.smollm2 import fetch_smollm2
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(fetch_smollm2()))
    return [tuple(parameter.shape) for parameter in model.parameters()]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, action="append", help="only this learning rate")
    for made in steps(FOLDER, parser.parse_args().rate or LEARNING_RATES):
        changed = float(np.mean(made.old != made.new))
        print(f"lr {made.rate:.0e}: {made.old.size:,} parameters, {changed:.2%} of the masters changed")
