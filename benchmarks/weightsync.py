"""What weight sync costs, each figure against what the machine itself does in the same run.

    python benchmarks/weightsync.py                     all parts
    python benchmarks/weightsync.py transports          one part
    python benchmarks/weightsync.py transports --quick  a smaller run, to see that it works
    python benchmarks/weightsync.py --json              the same numbers as JSON

transports  Each transport that is installed here brings 1 GiB in buckets of 64 MiB into another process, beside a plain
            copy in memory, a plain socket with one stream and, where installed, iperf3 with one stream. Rounds take
            turns, so that a busy machine is busy for all. `of_memcpy` and `of_loopback` are medians of the ratios
            within a round; CPU-seconds count both processes. Targets: shm 0.8 of memcpy, tcp 0.9 of loopback.

A part is a module `weightsync_PART.py` beside this file with `measure(quick=…)`, which returns rows of numbers by name.
"""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path

PARTS = sorted(
    path.stem.removeprefix("weightsync_")
    for path in Path(__file__).parent.glob("weightsync_*.py")
    if "def measure(" in path.read_text()
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--quick", action="store_true", help="a small run, whose figures mean little")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    results: dict[str, dict[str, dict[str, float]]] = {}
    for part in options.parts or PARTS:
        results[part] = importlib.import_module(f"weightsync_{part}").measure(quick=options.quick)
        if not options.json:
            show(part, results[part])
    if options.json:
        print(json.dumps(results, indent=2))


def show(part: str, rows: dict[str, dict[str, float]]) -> None:
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    width = max(len(name) for name in [*rows, part]) + 2
    print(f"\n{part:{width}}" + "".join(f"{column:>{len(column) + 3}}" for column in columns))
    for name, row in rows.items():
        cells = (
            f"{row[column]:{len(column) + 3}.3f}" if column in row else " " * (len(column) + 3) for column in columns
        )
        print(f"{name:{width}}" + "".join(cells), flush=True)


if __name__ == "__main__":
    main()
