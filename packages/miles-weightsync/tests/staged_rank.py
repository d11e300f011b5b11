"""One of two trainer ranks on gloo that push by the staged way when told to on standard input, and answer in JSON.

usage: staged_rank.py RANK STORE FOLDER     (FOLDER has a config.json and v<N>.pt, the weights of version N)
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from die_with_parent import die_with_parent
from miles_weightsync import PushConfig, WeightSyncError
from miles_weightsync.planner import Megatron, ModelShape
from miles_weightsync.push import Pusher
from miles_weightsync.staged.sender import Sender
from miles_weightsync.transports.onesided import OneSidedOutbox
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transport_peer import own_stdout
from weightsync_fakes import AShard

SIZE = 2


def fsdp2(folder: Path, weights: dict[str, torch.Tensor]) -> Iterator[AShard]:
    """The rows that FSDP2 leaves on this rank, read from its DTensors."""
    model = torch.nn.Module()
    for name, tensor in weights.items():
        *path, leaf = name.split(".")
        module = model
        for part in path:
            if part not in dict(module.named_children()):
                module.add_module(part, torch.nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(leaf, torch.nn.Parameter(tensor.clone()))
    mesh = init_device_mesh("cpu", (SIZE,))
    for layer in model.get_submodule("model.layers").children():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for name, parameter in model.state_dict().items():
        local = parameter.to_local()
        step = -(-parameter.shape[0] // SIZE)
        start = min(dist.get_rank() * step, parameter.shape[0])
        box = ((start, start + local.shape[0]), *((0, n) for n in parameter.shape[1:]))
        yield AShard(name, tuple(parameter.shape), parameter.dtype, box, local)


def megatron(folder: Path, weights: dict[str, torch.Tensor]) -> Iterator[AShard]:
    """What ranks r and r + 2 of a TP2 x PP2 job hold: this tensor-parallel rank of both stages."""
    model = ModelShape.from_hf(json.loads((folder / "config.json").read_text()))
    rank = dist.get_rank()
    for name, tensor in Megatron(model=model, tp=2, pp=2).layout().tensors.items():
        for box, ranks in tensor.blocks:
            if {rank, rank + 2} & set(ranks):
                block = weights[name][tuple(slice(*span) for span in box)].contiguous()
                yield AShard(name, tensor.shape, block.dtype, box, block)


SOURCES: dict[str, Callable[[Path, dict[str, torch.Tensor]], Iterator[AShard]]] = {"fsdp2": fsdp2, "megatron": megatron}


def kill_session(session: int) -> None:
    """Kill a server, all of its processes."""
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(ProcessLookupError):
            if entry.name.isdecimal() and os.getsid(int(entry.name)) == session:
                os.kill(int(entry.name), signal.SIGKILL)


def after_the_first_bucket(action: Callable[[], None]) -> None:
    """Do something once this rank has packed a bucket, of whole values or of differences."""
    for name in ("_pack", "_content"):
        after_the_first(Sender, name, action)


def after_the_first(owner: Any, name: str, action: Callable[[], None]) -> None:
    real = getattr(owner, name)

    def call(*args: Any) -> Any:
        result = real(*args)
        setattr(owner, name, real)
        action()
        return result

    setattr(owner, name, call)


def carry_out(order: dict[str, Any], pusher: Pusher, folder: Path) -> dict[str, Any]:
    weights = torch.load(folder / f"v{order['version']}.pt")
    pusher.set_engines(order["urls"])
    shards = list(SOURCES[order["source"]](folder, weights))
    if order.get("dies") and dist.get_rank() == 1:
        if order["transport"] in ("mooncake", "nixl"):  # with a write on its way that nobody can take back
            after_the_first(OneSidedOutbox, "put", lambda: os._exit(9))
        else:
            after_the_first_bucket(lambda: os._exit(9))
    if order.get("kill") and dist.get_rank() == 0:
        after_the_first_bucket(lambda: kill_session(order["kill"]))  # nothing of this rank has been sent by then
    try:
        report = pusher.push(shards, version=order["version"])
        engines, error = report.engines, None
    except WeightSyncError as problem:
        engines, error = getattr(problem, "engines", ()), str(problem)
    told = [
        {"ok": e.ok, "kind": e.kind, "pause": e.pause_seconds, "bytes": e.bytes, "reason": e.reason} for e in engines
    ]
    is_equal = None
    if error is None and order.get("verify"):
        is_equal = [found.is_equal and found.unused == () for found in pusher.verify(shards).values()]
    return {"error": error, "engines": told, "equal": is_equal}


def main(rank: int, store: str, folder: Path) -> None:
    die_with_parent()
    answers = own_stdout()
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=SIZE, timeout=timedelta(seconds=120)
    )
    pushers: dict[str, Pusher] = {}
    print("ready", flush=True, file=answers)
    for line in sys.stdin:
        order = json.loads(line)
        key = f"{order['transport']} {order['source']}"
        if key not in pushers:
            config = PushConfig(
                way="staged", transport=order["transport"], bucket_bytes=64 * 1024, timeout_s=60, delta_history=4
            )
            pushers[key] = Pusher(order["urls"], config=config)
        print(json.dumps(carry_out(order, pushers[key], folder)), flush=True, file=answers)
    for pusher in pushers.values():
        pusher.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
