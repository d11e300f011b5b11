"""The machine: Python, memory, disks, ports, limits."""

from __future__ import annotations

import resource
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from miles_rollout.engines import is_port_free
from miles_tito.shared.http import NoAnswer, call_once

from miles_core.config import Config
from miles_core.run.dry_run import available_memory, disk_bytes, existing_folder, list_processes, read_shape

from .results import CheckResult

GIB = 2**30
SHM = Path("/dev/shm")


def python(version: tuple[int, int, int] = sys.version_info[:3]) -> Iterator[CheckResult]:
    text = ".".join(map(str, version))
    if version < (3, 11):
        yield CheckResult("python", "fail", f"Python {text}; Miles needs 3.11 or newer", "uv venv --python 3.11")
    else:
        yield CheckResult("python", "ok", f"Python {text}")


def shared_memory(config: Config, directory: Path = SHM) -> Iterator[CheckResult]:
    """Two weight buckets and Ray's object store live there."""
    free = shutil.disk_usage(directory).free
    buckets = 2 * config.sync.bucket_bytes if config.sync.way == "tensor" and config.sync.staging == "shm" else 0
    needed = buckets + (config.ray.object_store_bytes or GIB)
    message = f"{_gib(free)} free in {directory}; weight buckets and Ray's object store want {_gib(needed)}"
    if free >= needed:
        yield CheckResult("shared memory", "ok", message)
        return
    fix = (
        f"mount -o remount,size=50% {directory}, or docker run --shm-size={needed // GIB + 1}g, or lower "
        "sync.bucket_bytes and ray.object_store_bytes"
    )
    yield CheckResult("shared memory", "fail" if free < buckets + 2**28 else "warn", message, fix)


def disk(config: Config) -> Iterator[CheckResult]:
    """Where runs are written: trajectories, checkpoints, logs."""
    directory = Path(config.run.dir).expanduser()
    shape = read_shape(Path(config.model.path).expanduser()) if config.model.path else None
    needed = disk_bytes(config, shape) if shape else 0.0
    existing = existing_folder(directory)
    if not _is_writable(existing):
        yield CheckResult("disk", "fail", f"{existing} cannot be written to", "set run.dir to another place")
        return
    free = shutil.disk_usage(existing).free
    message = f"{_gib(free)} free for {directory}" + (f"; checkpoints take {_gib(needed)}" if needed else "")
    if free >= 5 * GIB + needed:
        yield CheckResult("disk", "ok", message)
    else:
        fix = "free some space, set run.dir to another disk, or lower checkpoint.keep"
        yield CheckResult("disk", "fail" if free < GIB // 2 + needed else "warn", message, fix)


def memory(config: Config, free: int | None = None) -> Iterator[CheckResult]:
    """What the plan estimates against what the machine has left."""
    free = available_memory() if free is None else free
    shape = read_shape(Path(config.model.path).expanduser()) if config.model.path else None
    needed = sum(p.num_bytes * p.count for p in list_processes(config, "rl", shape) if p.device == "cpu")
    message = f"{_gib(free)} free" + (f"; weights, optimizer and caches want {_gib(needed)}" if needed else "")
    fix = "lower train.token_budget or engines.NAME.max_total_tokens, or use a smaller model; see --dry-run"
    if needed and needed > free:
        yield CheckResult("memory", "fail", message, fix)
    elif free < 4 * GIB:
        yield CheckResult("memory", "warn", f"{message}; the libraries alone take about 4 GiB", fix)
    else:
        yield CheckResult("memory", "ok", message)


def ports(config: Config) -> Iterator[CheckResult]:
    """Ports that the configuration fixes must be free, servers that it attaches to must answer. Miles chooses all
    other ports itself, from free ones."""
    fixed = [
        (f"engines.{name}.options.{key}", value)
        for name, engine in config.engines.items()
        for key, value in engine.options.items()
        if key.endswith("port") and isinstance(value, int) and not isinstance(value, bool)
    ]
    for key, port in fixed:
        if is_port_free(port):
            yield CheckResult("ports", "ok", f"port {port} of {key} is free")
        else:
            fix = f"stop what listens there (ss -ltnp 'sport = :{port}'), or choose another port"
            yield CheckResult("ports", "fail", f"port {port} of {key} is in use", fix)
    urls = [(name, url) for name, engine in config.engines.items() for url in engine.urls]
    yield from (_server(name, url) for name, url in urls)
    if not fixed and not urls:
        yield CheckResult("ports", "ok", "none is fixed by the configuration; Miles takes free ones")


def open_files(config: Config, limit: int | None = None) -> Iterator[CheckResult]:
    """An episode holds a few sockets in the worker and in the session server."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if limit is None else limit
    episodes = config.rollout.max_concurrent_episodes
    needed = 1024 + 8 * episodes
    message = f"{limit} allowed; {episodes} episodes at once want about {needed}"
    if limit >= needed or limit == resource.RLIM_INFINITY:
        yield CheckResult("open files", "ok", message)
    else:
        yield CheckResult(
            "open files", "warn", message, f"ulimit -n {needed}, or lower rollout.max_concurrent_episodes"
        )


def _server(name: str, url: str) -> CheckResult:
    try:
        answer = call_once("GET", f"{url}/health", timeout_s=5)
    except NoAnswer as error:
        wrong = f"does not answer: {error.reason}"
    else:
        if answer.is_ok:
            return CheckResult("ports", "ok", f"{url} of engines.{name} answers {answer.status}")
        wrong = f"answers {answer.status} {answer.excerpt()}"
    fix = "start that server, correct engines.NAME.urls, or leave urls out so that Miles starts one"
    return CheckResult("ports", "fail", f"{url} of engines.{name} {wrong}", fix)


def _is_writable(directory: Path) -> bool:
    """Tried rather than asked: a read-only mount and a quota say yes to `os.access`."""
    probe = directory / ".miles-doctor"
    try:
        probe.touch()
        probe.unlink()
    except OSError:
        return False
    return True


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"
