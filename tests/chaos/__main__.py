"""`make chaos SEEDS=200`, or `python -m chaos [--seed S] [--seeds N] [--json] [@ FILE] [--dotted.key VALUE] …`."""

from __future__ import annotations

import argparse
import sys

from miles_core.config.load import load_config
from miles_tito.errors import MilesError

from .command import play_seeds


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="make chaos", description="Break scripted runs on purpose and prove that nothing is lost or trained twice."
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="decides what breaks and when; 0 by default")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="play N seeds from S on")
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each seed")
    options, words = parser.parse_known_args()
    if options.seeds < 1:
        parser.error(f"--seeds is {options.seeds}; nothing would be played and nothing shown. Say 1 or more.")
    try:
        config = load_config(words, kind="rl").config if words else None
    except MilesError as error:
        print(error, file=sys.stderr)
        return 2
    return 0 if play_seeds(options.seed, options.seeds, config, words=words, as_json=options.json) else 1


if __name__ == "__main__":
    sys.exit(main())
