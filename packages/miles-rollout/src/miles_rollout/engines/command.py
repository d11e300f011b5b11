"""The command line and environment that start one server."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from miles_rollout.engines.config import EngineConfig, OptionValue, resolve_device, to_arguments

CPU_MODULE = "miles_rollout.engines.sglang_cpu"
CUDA_MODULE = "sglang.launch_server"

CPU_DEFAULTS: Mapping[str, OptionValue] = {
    "sleep-on-idle": True,  # an idle scheduler otherwise spins on a whole core
    "log-level-http": "warning",  # a line for each request would drown the rest
}
CUDA_DEFAULTS: Mapping[str, OptionValue] = {"log-level-http": "warning"}
CPU_KV_TOKENS = 32768


def server_command(
    config: EngineConfig, *, model_path: str | Path, host: str, port: int, weight_version: int
) -> list[str]:
    """What starts a server of `config`: our launcher on a CPU, SGLang's own on a GPU."""
    on_cpu = resolve_device(config.device, config.env) == "cpu"
    required: dict[str, OptionValue] = {
        "model-path": str(model_path),
        "host": host,
        "port": port,
        "weight-version": str(weight_version),
    }
    chosen: dict[str, OptionValue | None] = {
        "tp-size": config.tp if config.tp > 1 else None,
        "dp-size": config.dp if config.dp > 1 else None,
        "dtype": config.dtype or ("float32" if on_cpu else None),
        "context-length": config.context_length,
        "max-total-tokens": config.max_total_tokens or (CPU_KV_TOKENS if on_cpu else None),
    }
    options = {
        **required,
        **{key: value for key, value in chosen.items() if value is not None},
        **(CPU_DEFAULTS if on_cpu else CUDA_DEFAULTS),
        **config.options,
    }
    return [sys.executable, "-m", CPU_MODULE if on_cpu else CUDA_MODULE, *to_arguments(options)]


def server_environment(config: EngineConfig, *, model_path: str | Path) -> dict[str, str]:
    """What a server has in its environment besides this process's."""
    env = {"PYTHONUNBUFFERED": "1"}
    if Path(model_path).is_dir():
        env["HF_HUB_OFFLINE"] = "1"  # a local model needs no hub, and asking it costs seconds without a network
    if resolve_device(config.device, config.env) == "cpu":
        threads = config.threads or max(1, (os.cpu_count() or 1) // config.count)
        # OpenBLAS starts its threads when numpy is imported, and the launcher forks only while it has a single one.
        env |= {"OMP_NUM_THREADS": str(threads), "OPENBLAS_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        if (ranks := config.tp * config.dp) > 1:
            env["SGLANG_CPU_OMP_THREADS_BIND"] = core_groups(sorted(os.sched_getaffinity(0)), ranks)
    return {**env, **config.env}


def core_groups(cores: Sequence[int], ranks: int) -> str:
    """Cores for each rank, as SGLang reads them: `0,1|2,3`. With fewer cores than ranks, ranks share.

    Without this SGLang refuses more ranks than the machine has NUMA nodes.
    """
    starts = [rank * len(cores) // ranks for rank in range(ranks + 1)]
    groups = [cores[start : max(end, start + 1)] for start, end in pairwise(starts)]
    return "|".join(",".join(map(str, group)) for group in groups)
