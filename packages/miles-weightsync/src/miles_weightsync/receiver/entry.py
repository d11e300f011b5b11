"""What SGLang calls: `--custom-weight-loader miles_weightsync.receiver.load`."""

from __future__ import annotations

import importlib
import json
import logging
from collections.abc import Sequence
from typing import Any

import torch

from .receiver import Receiver

_log = logging.getLogger(__name__)
_receivers: dict[int, Receiver] = {}
"""By tensor-parallel rank: one, in an engine's process."""


def load(model: torch.nn.Module, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Carry out a command of a pusher in this engine rank: the name of the only tensor is the command, as JSON.

    Never raises, since that would end the engine; what went wrong is told over the control connection.
    """
    try:
        command = json.loads(named_tensors[0][0])
        rank, world = _place()
        if rank not in _receivers:
            _receivers[rank] = Receiver(rank=rank, world=world)
        _receivers[rank].run(model, command)
    except Exception:  # see above
        _log.exception("a command for the weight receiver could not be read")


def _place() -> tuple[int, int]:
    """(tensor-parallel rank, number of them) of this process of SGLang."""
    parallel: Any = importlib.import_module("sglang.srt.runtime_context").get_parallel()  # only there inside an engine
    return int(parallel.tp_rank), int(parallel.tp_size)
