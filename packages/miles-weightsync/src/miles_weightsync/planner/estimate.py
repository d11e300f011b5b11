"""What a plan costs beside a broadcast and an all-gather of the same weights: bytes, and time for a stated NIC."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass

from ..layout import volume
from .layout import ITEM_BYTES, Layout
from .plan import Plan

_LAYER = re.compile(r"^(.*?layers\.\d+)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Baselines:
    """What needs no plan."""

    bytes_broadcast: int
    """Bytes delivered when every target rank receives every needed tensor whole."""
    bytes_allgather: int
    """Bytes that source ranks receive when all that hold part of a layer gather that layer whole, before they send."""
    allgather_of_one_rank: int
    """The most of that on one rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seconds:
    """Estimates: bytes of the busiest rank over the bandwidth of its NIC, one NIC a rank, nothing else in the way."""

    plan: float
    """Copies within a host are not counted."""
    broadcast: float
    """Every target rank receives the whole model."""
    allgather: float
    """The gather alone; the weights have yet to be sent."""


def baselines(source: Layout, target: Layout) -> Baselines:
    """Count what a broadcast and an all-gather would move."""
    whole = sum(tensor.nbytes for tensor in target.tensors.values())
    layers: dict[str, int] = defaultdict(int)
    held: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for name in target.tensors:
        tensor = source.tensors[name]
        match = _LAYER.match(name)
        group = match.group(1) if match else name
        layers[group] += tensor.nbytes
        for box, ranks in tensor.blocks:
            nbytes = volume(box) * ITEM_BYTES[tensor.dtype]
            for rank in ranks:
                held[group][rank] += nbytes
    missing: dict[int, int] = defaultdict(int)
    for group, of_rank in held.items():
        for rank, nbytes in of_rank.items():
            missing[rank] += layers[group] - nbytes
    return Baselines(
        bytes_broadcast=whole * len(target.hosts),
        bytes_allgather=sum(missing.values()),
        allgather_of_one_rank=max(missing.values(), default=0),
    )


def seconds(plan: Plan, source: Layout, target: Layout, *, nic_gbit_s: float) -> Seconds:
    """Estimate times for ranks with a NIC of `nic_gbit_s` Gbit/s each."""
    rate = nic_gbit_s * 1e9 / 8
    out, into = dict.fromkeys(source.hosts, 0), dict.fromkeys(target.hosts, 0)
    for copy in plan.copies:
        if source.hosts[copy.src] != target.hosts[copy.dst]:
            out[copy.src] += copy.nbytes
            into[copy.dst] += copy.nbytes
    base = baselines(source, target)
    return Seconds(
        plan=max(*out.values(), *into.values(), 0) / rate,
        broadcast=base.bytes_broadcast / max(len(target.hosts), 1) / rate,
        allgather=base.allgather_of_one_rank / rate,
    )
