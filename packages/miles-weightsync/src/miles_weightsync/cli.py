"""The command line: `miles-weightsync`, or `python -m` with the name of a vendored copy."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from .planner.command import add_parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    parser = argparse.ArgumentParser(prog="miles-weightsync", description="Weights from trainers into engines.")
    add_parser(parser.add_subparsers(required=True, metavar="COMMAND"))
    options = parser.parse_args(arguments)
    return options.run(options)
