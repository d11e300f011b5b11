"""`miles-quant`: convert, dequantize, compare and verify."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace

from .errors import QuantError
from .formats.names import SHORT_NAMES
from .recipe.recipe import Recipe


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 done and equal, 1 something differs or cannot be done, 2 wrong usage."""
    options = _parser().parse_args(arguments)
    try:
        return options.run(options)
    except (QuantError, OSError) as error:
        print(f"miles-quant: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="miles-quant", description="Low-precision model folders, bit for bit.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    convert = commands.add_parser("convert", help="quantise a Hugging Face folder; run again to resume")
    convert.add_argument("source")
    convert.add_argument("target")
    convert.add_argument(
        "--recipe", required=True, help=f"{', '.join(SHORT_NAMES)}, a full format name, or a .toml or .json file"
    )
    convert.add_argument("--keep", action="append", default=[], metavar="SUBSTRING", help="names that stay as they are")
    convert.add_argument("--keep-first-layers", type=int, metavar="N")
    convert.add_argument("--keep-last-layers", type=int, metavar="N")
    convert.set_defaults(run=_convert)

    dequantize = commands.add_parser(
        "dequantize", help="quantised weights back to plain ones: the values that engines compute with"
    )
    dequantize.add_argument("source")
    dequantize.add_argument("target")
    dequantize.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    dequantize.set_defaults(run=_dequantize)

    for command in (convert, dequantize):
        command.add_argument("--workers", type=int, default=1, metavar="N", help="files at a time (default 1)")
        command.add_argument("--quiet", action="store_true", help="no progress")

    compare = commands.add_parser("compare", help="two folders, tensor by tensor")
    compare.add_argument("first")
    compare.add_argument("second")
    compare.add_argument("--exact", action="store_true", help="exit 1 unless every tensor is equal")
    compare.set_defaults(run=_compare)

    verify = commands.add_parser("verify", help="every format against golden vectors; exit 1 on any differing byte")
    verify.add_argument("--golden", required=True, metavar="FILE.npz")
    verify.set_defaults(run=_verify)
    for command in (compare, verify):
        command.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _convert(options: argparse.Namespace) -> int:
    from .checkpoints.convert import convert

    recipe = Recipe.load(options.recipe)
    given = {key: getattr(options, key) for key in ("keep_first_layers", "keep_last_layers")}
    given = {key: number for key, number in given.items() if number is not None}
    recipe = replace(recipe, keep_bf16=(*recipe.keep_bf16, *options.keep), **given)
    report = convert(options.source, options.target, recipe, workers=options.workers, is_quiet=options.quiet)
    print(
        f"{report.num_changed} of {report.num_tensors} tensors quantised to {recipe.spec.name}: "
        f"{report.source_bytes / 1e9:.3f} GB became {report.target_bytes / 1e9:.3f} GB in {report.path}"
    )
    return 0


def _dequantize(options: argparse.Namespace) -> int:
    import torch

    from .checkpoints.dequantize import dequantize

    dtype = getattr(torch, options.dtype)
    report = dequantize(options.source, options.target, dtype=dtype, workers=options.workers, is_quiet=options.quiet)
    print(f"{report.num_changed} matrices dequantised to {options.dtype} in {report.path}")
    return 0


def _compare(options: argparse.Namespace) -> int:
    from .checkpoints.compare import compare

    differs = False
    if not options.json:
        print(f"{'codes':>6} {'scales':>6} {'max error':>10} {'mean error':>10} {'cosine':>10}  tensor")
    for row in compare(options.first, options.second):
        differs = differs or not row.is_equal
        if options.json:
            print(json.dumps(asdict(row)))
        else:
            codes, scales = _word(row.codes_equal), _word(row.scales_equal)
            print(
                f"{codes:>6} {scales:>6} {row.max_error:>10.3g} {row.mean_error:>10.3g} {row.cosine:>10.7f}  {row.name}"
            )
    return int(differs and options.exact)


def _verify(options: argparse.Namespace) -> int:
    from .verify import verify_golden

    rows = verify_golden(options.golden)
    differs = any(row.different_bytes for row in rows)
    if options.json:
        print(json.dumps({"equal": not differs, "formats": [asdict(row) for row in rows]}, indent=2))
        return int(differs)
    print(f"{'format':<22} {'arrays':>6} {'bytes':>10} {'differ':>8}  first difference")
    for row in rows:
        print(
            f"{row.format:<22} {row.num_arrays:>6} {row.num_bytes:>10} {row.different_bytes:>8}  "
            f"{row.first_difference or '-'}"
        )
    print("all bytes equal" if not differs else "some bytes differ")
    return int(differs)


def _word(equal: bool | None) -> str:
    return "-" if equal is None else "same" if equal else "DIFFER"
