"""The command line: `miles-weightsync`, or `python -m` with the name of a vendored copy."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from .planner import command as plan
from .stored import command as follow


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    parser = argparse.ArgumentParser(prog="miles-weightsync", description="Weights from trainers into engines.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    plan.add_parser(commands)
    follow.add_parser(commands)
    options = parser.parse_args(arguments)
    return options.run(options)
