"""`miles-weightsync plan`: what one update would move, for a preset or for two layout files."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path

from ..errors import ShardError
from .estimate import baselines, seconds
from .layout import Layout
from .plan import Plan, make_plan
from .presets import PRESETS


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:  # pyright: ignore[reportPrivateUsage]
    """Register the command."""
    parser = commands.add_parser("plan", help="which bytes one update moves", description=__doc__)
    parser.add_argument("--preset", choices=sorted(PRESETS), help="a known model at its usual rank counts")
    parser.add_argument("--src", type=Path, metavar="SRC.json", help="layout of the trainer ranks")
    parser.add_argument("--dst", type=Path, metavar="DST.json", help="layout of the engine ranks")
    parser.add_argument("--nic", type=float, default=400.0, metavar="GBIT_S", help="NIC of each rank, default 400")
    parser.add_argument("--copies", type=Path, metavar="FILE", help="write every copy, one JSON object a line")
    parser.add_argument("--json", action="store_true", help="answer in JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Plan and print. Returns the exit status: 0, or 2 for unusable input."""
    try:
        about, source, target = _layouts(options)
        if not target.tensors:
            raise ShardError(f"{options.dst}: no rank needs a tensor; there is nothing to plan.")
        started = time.perf_counter()
        plan = make_plan(source, target)
        plan_seconds = time.perf_counter() - started
        if options.copies:
            _write_copies(options.copies, plan)
    except (ShardError, OSError) as error:
        print(f"miles-weightsync plan: {error}", file=sys.stderr)
        return 2
    answer = summary(plan, source, target, plan_seconds=plan_seconds, nic_gbit_s=options.nic)
    print(json.dumps(answer, indent=2) if options.json else _table(about, answer))
    return 0


def summary(
    plan: Plan, source: Layout, target: Layout, *, plan_seconds: float, nic_gbit_s: float
) -> dict[str, int | float]:
    """The figures of a plan, as `--json` prints them. `copies` is their number; `estimated_*` are estimates."""
    base, estimated = baselines(source, target), seconds(plan, source, target, nic_gbit_s=nic_gbit_s)
    return {
        "copies": len(plan.copies),
        "bytes_moved": plan.bytes_moved,
        "bytes_needed": plan.bytes_needed,
        "moved_over_needed": plan.bytes_moved / plan.bytes_needed if plan.bytes_needed else 1.0,
        "sender_max_over_mean": plan.sender_max_over_mean,
        "receiver_max_over_mean": plan.receiver_max_over_mean,
        "bytes_broadcast": base.bytes_broadcast,
        "bytes_allgather": base.bytes_allgather,
        "plan_seconds": plan_seconds,
        "src_ranks": len(source.hosts),
        "dst_ranks": len(target.hosts),
        "nic_gbit_s": nic_gbit_s,
        "estimated_seconds": estimated.plan,
        "estimated_seconds_broadcast": estimated.broadcast,
        "estimated_seconds_allgather": estimated.allgather,
    }


def _layouts(options: argparse.Namespace) -> tuple[str, Layout, Layout]:
    if not 0 < options.nic < math.inf:
        raise ShardError(f"--nic {options.nic} must be more than 0 Gbit/s, and finite.")
    if options.copies is not None and options.copies in (options.src, options.dst):
        raise ShardError(f"--copies {options.copies} would overwrite the layout that is read; name another file.")
    files = options.src is not None, options.dst is not None
    if options.preset and not any(files):
        preset = PRESETS[options.preset]()
        return f"{options.preset}: {preset.about}", *preset.layouts()
    if all(files) and not options.preset:
        return f"{options.src} → {options.dst}", Layout.read(options.src), Layout.read(options.dst)
    raise ShardError(f"Give either --preset ({', '.join(sorted(PRESETS))}) or both --src and --dst.")


def _write_copies(path: Path, plan: Plan) -> None:
    with path.open("w") as file:
        for copy in plan.copies:
            boxes = {"box": copy.box, "src_block": copy.src_block, "dst_block": copy.dst_block}
            line = {"src": copy.src, "dst": copy.dst, "name": copy.name, **boxes, "bytes": copy.nbytes}
            file.write(json.dumps(line) + "\n")


def _table(about: str, answer: dict[str, int | float]) -> str:
    def gigabytes(key: str) -> str:
        return f"{answer[key] / 1e9:12,.1f} GB"

    return "\n".join(
        (
            about,
            f"  ranks       {answer['src_ranks']} → {answer['dst_ranks']}",
            f"  copies      {answer['copies']:,}, planned in {answer['plan_seconds']:.2f} s",
            f"  moved       {gigabytes('bytes_moved')}  = {answer['moved_over_needed']:.3f} x needed",
            f"  balance     senders {answer['sender_max_over_mean']:.3f}, "
            f"receivers {answer['receiver_max_over_mean']:.3f} (busiest ÷ mean)",
            f"  broadcast   {gigabytes('bytes_broadcast')}  would be delivered",
            f"  all-gather  {gigabytes('bytes_allgather')}  would be received by the trainer before it sends",
            f"  estimate at {answer['nic_gbit_s']:g} Gbit/s a rank: plan {answer['estimated_seconds']:.2f} s, "
            f"broadcast {answer['estimated_seconds_broadcast']:.1f} s, "
            f"all-gather alone {answer['estimated_seconds_allgather']:.1f} s",
        )
    )
