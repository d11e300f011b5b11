"""The checks of `miles doctor`: the machine, what is installed on it, and the model."""

from __future__ import annotations

import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib import metadata
from pathlib import Path

from miles_rollout.engines import EngineVersionError, check_sglang, check_smg, has_gpu, is_port_free, resolve_device
from miles_rollout.engines.versions import Device
from miles_tito.errors import MilesError
from miles_tito.shared.http import NoAnswer, call_once
from miles_tito.shared.settings import SettingError
from miles_tito.tokens.family_choice import choose_family, probe_template
from miles_tito.tokens.tokenizer import load_tokenizer
from packaging.requirements import Requirement

from miles_core.config import Config
from miles_core.run.dry_run import (
    available_memory,
    disk_bytes,
    existing_folder,
    list_processes,
    model_folder,
    quant_line,
    read_shape,
)

from .results import CheckResult, Level

GIB = 2**30
SHM = Path("/dev/shm")
MILES = ("core", "tito", "rollout", "envs", "train", "weightsync", "quant")
ASK_TORCH = "import torch; print(torch.__version__, torch.cuda.device_count() if torch.cuda.is_available() else 0)"


def python(version: tuple[int, int, int] = sys.version_info[:3]) -> Iterator[CheckResult]:
    text = ".".join(map(str, version))
    if version < (3, 11):
        yield CheckResult("python", "fail", f"Python {text}; Miles needs 3.11 or newer", "uv venv --python 3.11")
    else:
        yield CheckResult("python", "ok", f"Python {text}")


def shared_memory(config: Config) -> Iterator[CheckResult]:
    """Two weight buckets and Ray's object store live there."""
    free = shutil.disk_usage(SHM).free
    buckets = 2 * config.sync.bucket_bytes if config.sync.way == "tensor" and config.sync.staging == "shm" else 0
    needed = buckets + (config.ray.object_store_bytes or GIB)
    message = f"{_gib(free)} free in {SHM}; weight buckets and Ray's object store want {_gib(needed)}"
    fix = (
        f"mount -o remount,size=50% {SHM}, or docker run --shm-size={needed // GIB + 1}g, or lower "
        "sync.bucket_bytes and ray.object_store_bytes"
    )
    yield _room("shared memory", free, message, fix, wanted=needed, least=buckets + 2**28)


def disk(config: Config) -> Iterator[CheckResult]:
    """Where runs are written: trajectories, checkpoints, logs."""
    directory = Path(config.run.dir).expanduser()
    shape = read_shape(model_folder(config))
    needed = disk_bytes(config, shape) if shape else 0.0
    existing = existing_folder(directory)
    if not _is_writable(existing):
        yield CheckResult("disk", "fail", f"{existing} cannot be written to", "set run.dir to another place")
        return
    free = shutil.disk_usage(existing).free
    message = f"{_gib(free)} free for {directory}" + (f"; checkpoints take {_gib(needed)}" if needed else "")
    fix = "free some space, set run.dir to another disk, or lower checkpoint.keep"
    yield _room("disk", free, message, fix, wanted=5 * GIB + needed, least=GIB // 2 + needed)


def memory(config: Config) -> Iterator[CheckResult]:
    """What the plan estimates against what the machine has left."""
    free, shape = available_memory(), read_shape(model_folder(config))
    needed = sum(p.num_bytes * p.count for p in list_processes(config, "rl", shape) if p.device == "cpu")
    message = f"{_gib(free)} free" + (f"; weights, optimizer and caches want {_gib(needed)}" if needed else "")
    if needed <= free < 4 * GIB:
        message += "; the libraries alone take about 4 GiB"
    fix = "lower train.token_budget or engines.NAME.max_total_tokens, or use a smaller model; see --dry-run"
    yield _room("memory", free, message, fix, wanted=max(needed, 4 * GIB), least=needed)


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


def open_files(config: Config) -> Iterator[CheckResult]:
    """An episode holds a few sockets in the worker and in the session server."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    episodes = config.rollout.max_concurrent_episodes
    needed = 1024 + 8 * episodes
    message = f"{limit} allowed; {episodes} episodes at once want about {needed}"
    if limit >= needed or limit == resource.RLIM_INFINITY:
        yield CheckResult("open files", "ok", message)
    else:
        fix = f"ulimit -n {needed}, or lower rollout.max_concurrent_episodes"
        yield CheckResult("open files", "warn", message, fix)


def installed(name: str) -> str | None:
    """The version of a distribution, None where it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def torch(config: Config) -> Iterator[CheckResult]:
    """Imported in another process: a broken build may crash, and a good one takes seconds."""
    ask = (sys.executable, "-c", ASK_TORCH)
    result = subprocess.run(ask, capture_output=True, text=True, timeout=120, check=False)
    if result.returncode:
        reason = (result.stderr.strip().splitlines() or [f"exit status {result.returncode}"])[-1]
        fix = "uv pip install --torch-backend=auto torch"
        yield CheckResult("torch", "fail", f"torch cannot be imported: {reason}", fix)
        return
    version, gpus = result.stdout.split()
    if int(gpus):
        yield CheckResult("torch", "ok", f"torch {version} with {gpus} GPUs")
    elif config.train.device == "cuda" or (config.train.device == "auto" and has_gpu()):
        message = f"torch {version} sees no GPU, but the machine or train.device names one"
        fix = "uv pip install --torch-backend=auto torch; compare its CUDA with nvidia-smi; or train.device = cpu"
        yield CheckResult("torch", "fail", message, fix)
    else:
        yield CheckResult("torch", "ok", f"torch {version} on the CPU")


def sglang(config: Config) -> Iterator[CheckResult]:
    """The exact release for each device that engines start on."""
    devices: set[Device] = {resolve_device(engine.device) for engine in config.engines.values() if not engine.urls}
    if not devices:
        yield CheckResult("sglang", "ok", "no engine is started here")
    for device in devices:
        yield _version_check("sglang", partial(check_sglang, device), level="fail")


def router(config: Config) -> Iterator[CheckResult]:
    """Needed as soon as one table has more than one server."""
    is_needed = any(engine.num_servers > 1 for engine in config.engines.values())
    yield _version_check("router", check_smg, level="fail" if is_needed else "warn")


def ray() -> Iterator[CheckResult]:
    found = installed("ray")
    if found is None:
        yield CheckResult("ray", "fail", "ray is not installed", "uv pip install 'ray>=2.50'")
    else:
        yield CheckResult("ray", "ok", f"ray {found}")


def requirements() -> Iterator[CheckResult]:
    """Every requirement that Miles declares against what is installed; those of an extra only where it is installed.

    SGLang and its router have checks of their own, which know the exact releases.
    """
    wrong: list[CheckResult] = []
    count = 0
    for package in (f"miles-{part}" for part in MILES):
        if installed(package) is None:
            continue
        for line in metadata.requires(package) or ():
            requirement = Requirement(line)
            found = installed(requirement.name)
            is_optional = requirement.marker is not None and not requirement.marker.evaluate({"extra": ""})
            if requirement.name in ("sglang", "smg") or (found is None and is_optional):
                continue
            count += 1
            if found is None or not requirement.specifier.contains(found, prereleases=True):
                wrong.append(_mismatch(package, requirement, found))
    yield from wrong or [CheckResult("packages", "ok", f"{count} requirements of the Miles packages are met")]


def template(folder: Path | None, *, family: str) -> Iterator[CheckResult]:
    """Every case in which a conversation would have to be tokenized anew, which loses the sampled tokens."""
    if folder is None:
        yield CheckResult("template", "ok", "no model folder is named; `--model DIR` checks one")
        return
    try:
        tokenizer = load_tokenizer(folder)
        cases = probe_template(tokenizer, None if family == "auto" else choose_family(family, tokenizer))
    except (MilesError, OSError) as error:
        yield CheckResult("template", "fail", f"{folder}: {error}", "set model.path to a Hugging Face folder")
        return
    fix = (
        "set model.family to the model's family, or mend chat_template.jinja: a later turn must not change how earlier "
        "ones are written"
    )
    broken = [case for case in cases if case.level == "error"]
    yield from (CheckResult("template", "fail", f"not append-only: {c.case}: {c.message}", fix) for c in broken)
    yield from (CheckResult("template", "warn", f"{c.case}: {c.message}") for c in cases if c.level == "warning")
    if not broken:
        yield CheckResult("template", "ok", f"{folder.name} is append-only in {len(cases)} cases")


def quant(config: Config) -> Iterator[CheckResult]:
    """Whether the model can be held in the numbers of `[quant]`; nothing where there are none."""
    if config.quant is None:
        return
    try:
        message = quant_line(config.quant, model_folder(config))
    except SettingError as error:
        fix = "change quant.only, quant.keep_bf16 or quant.format; `miles-quant convert` takes the same recipe"
        yield CheckResult("quant", "fail", str(error), fix)
    else:
        yield CheckResult("quant", "ok", message.removeprefix("quant "))


def _room(name: str, free: int, message: str, fix: str, *, wanted: float, least: float) -> CheckResult:
    """Whether the bytes that are free are those wanted, or at least those without which no run starts."""
    if free >= wanted:
        return CheckResult(name, "ok", message)
    return CheckResult(name, "fail" if free < least else "warn", message, fix)


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


def _mismatch(package: str, requirement: Requirement, found: str | None) -> CheckResult:
    state = "is not installed" if found is None else f"{found} is installed"
    wanted = f"{requirement.name}{requirement.specifier}"
    message = f"{requirement.name} {state}, but {package} needs {wanted}"
    return CheckResult("packages", "fail", message, f"uv pip install '{wanted}'")


def _version_check(name: str, check: Callable[[], str], *, level: Level) -> CheckResult:
    try:
        return CheckResult(name, "ok", check())
    except EngineVersionError as error:
        # "What is wrong. Install it: command": the sentence that leads to the command says nothing by itself.
        told, _, fix = str(error).rpartition(": ")
        message = told.rpartition(". ")[0] or told
        return CheckResult(name, level, message, fix)


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"
