"""Ray itself, up for the duration of a run."""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import ray
from miles_tito.errors import MilesError

from miles_core.config import RayConfig

logger = logging.getLogger(__name__)

LAST_LINES = 8
"""Lines of a log of Ray that an error shows."""


class RayStartError(MilesError, RuntimeError):
    """Ray's own processes did not come up."""


@asynccontextmanager
async def cluster(config: RayConfig) -> AsyncIterator[None]:
    """Ray for the duration of a run: started here, or joined at `config.address`."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Threads that spin while they wait take the cores from the engine, which runs on the same ones.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Ray's default of 15 would also slow the engines, whose processes are children of an actor.
    os.environ.setdefault("RAY_worker_niceness", "0")
    options: dict[str, Any] = {"log_to_driver": config.log_to_driver, "logging_level": logging.ERROR}
    if config.address is None:
        # The dashboard costs seconds to start and nothing here reads it.
        options |= {"include_dashboard": False, "_node_ip_address": "127.0.0.1"}
        if config.num_cpus is not None:
            options["num_cpus"] = config.num_cpus
        if config.object_store_bytes is not None:
            options["object_store_memory"] = config.object_store_bytes
    else:
        options["address"] = config.address
    starting = asyncio.ensure_future(asyncio.to_thread(_start, options))
    try:
        await asyncio.shield(starting)
        yield
    finally:
        await asyncio.wait([starting])  # Ray cannot be interrupted while it starts, and must not be left running
        await asyncio.to_thread(ray.shutdown)


def _start(options: dict[str, Any]) -> None:
    """Start or join Ray; once more where a busy machine took longer than the fixed time that Ray gives its parts."""
    try:
        ray.init(**options)
    except Exception as error:  # Ray raises RuntimeError or a bare Exception, by the part that was late
        if "timed out" not in str(error).lower():
            raise
        logger.warning("Ray did not start in its time and is started once more: %s\n%s", error, _last_words(str(error)))
        ray.shutdown()
        try:
            ray.init(**options)
        except Exception as again:
            raise RayStartError(f"Ray did not start, twice: {again}\n{_last_words(str(again))}") from again


def _last_words(error: str) -> str:
    """The end of what Ray's head processes wrote: an error names the file waited for, not why nobody wrote it."""
    session = re.search(r"/\S*/session_[^/\s]+", error)
    if session is None:
        return ""
    logs = Path(session[0]) / "logs"
    tails = [
        f"{path}: " + " | ".join(lines[-LAST_LINES:])
        for path in sorted([*logs.glob("gcs_server.*"), *logs.glob("raylet.*")])
        if (lines := path.read_text(errors="replace").splitlines())
    ]
    # A fork of this process can hang before it becomes Ray's: torch's gloo groups do that to it.
    return "\n".join(tails) or f"Neither gcs_server nor raylet wrote anything into {logs}: they hang, or never ran."
