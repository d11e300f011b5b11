"""The `[engines.NAME]` table: how many engines of a kind, where, and with which options of SGLang."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from miles_tito.shared.settings import SettingError, at_least, require

from miles_rollout.engines.health import HealthConfig
from miles_rollout.engines.versions import Device

Role = Literal["rollout", "eval", "teacher", "prefill", "decode"]
VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"

OptionValue = bool | int | float | str | Sequence[int | float | str]

RESERVED: Mapping[str, str] = {
    "model": "the engines serve the model of the run",
    "model-path": "the engines serve the model of the run",
    "weight-version": "Miles numbers the weights it pushes",
    "host": "Miles chooses the address",
    "port": "Miles chooses a free port",
    "tp": "set `tp` of the engine",
    "tp-size": "set `tp` of the engine",
    "tensor-parallel-size": "set `tp` of the engine",
    "dp": "set `dp` of the engine",
    "dp-size": "set `dp` of the engine",
    "data-parallel-size": "set `dp` of the engine",
    "device": "set `device` of the engine",
    "dtype": "set `dtype` of the engine",
    "context-length": "set `context_length` of the engine",
    "max-total-tokens": "set `max_total_tokens` of the engine",
    "skip-server-warmup": "the warm-up shows when a server is ready",
}
"""Options of SGLang that `options` may not hold, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """SGLang servers of one kind, as one table of the configuration describes them."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012  (read by pydantic in miles-core; no dependency here)

    role: Role = "rollout"
    """What the engines are for. Only `rollout` engines receive new weights at every step."""
    count: int = 1
    """Servers to start; more than one sit behind the router."""
    tp: int = 1
    """Tensor-parallel ranks of one server."""
    dp: int = 1
    """Data-parallel ranks of one server."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` is cuda where a GPU is visible, cpu elsewhere."""
    dtype: str | None = None
    """Number format of weights and cache. None: float32 on a CPU, where log-probs then agree with the trainer's to
    1e-5, and the model's own on a GPU."""
    context_length: int | None = None
    """Longest prompt and response together. None: what the model's config says."""
    max_total_tokens: int | None = None
    """Tokens that the KV cache holds. None: 32768 on a CPU, where SGLang would otherwise take two thirds of the
    memory, and SGLang's own choice on a GPU."""
    threads: int | None = None
    """OMP threads of one server on a CPU. None: the machine's cores over `count`."""
    urls: tuple[str, ...] = ()
    """Servers that already run, instead of starting any."""
    options: Mapping[str, OptionValue] = field(default_factory=dict[str, OptionValue])
    """Any option of `sglang.launch_server` without its dashes: true is a bare flag, false leaves it out, a list
    repeats the value. `mem-fraction-static = 0.8` is `--mem-fraction-static 0.8`."""
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    """Added to the environment of the servers."""
    start_timeout_s: float = 300.0
    """How long one server may take to come up."""
    health: HealthConfig = field(default_factory=HealthConfig)
    """When an engine counts as dead, and how often it is started again."""

    def __post_init__(self) -> None:
        at_least(self, 1, "count", "tp", "dp", "context_length", "max_total_tokens", "threads")
        require(self.start_timeout_s > 0, "start_timeout_s", self.start_timeout_s, "positive")
        object.__setattr__(self, "urls", tuple(url.rstrip("/") for url in self.urls))
        object.__setattr__(self, "options", {_dashed(key): value for key, value in self.options.items()})
        self._check_urls()
        for key in self.options:
            if key in RESERVED:
                raise SettingError(f"`options.{key}` of an engine cannot be set: {RESERVED[key]}.")

    def _check_urls(self) -> None:
        for url in self.urls:
            if not url.startswith(("http://", "https://")):
                raise SettingError(f"Engine url {url!r} does not start with http:// or https://.")
        if len(set(self.urls)) != len(self.urls):
            raise SettingError(f"`urls` of an engine names a server twice: {', '.join(self.urls)}.")
        unused = [name for name in ("options", "env") if getattr(self, name)]
        if self.urls and unused:
            raise SettingError(
                f"`{'` and `'.join(unused)}` have no effect on the {len(self.urls)} servers of `urls`, which run "
                "already. Start those servers with the options, or leave `urls` out."
            )

    @property
    def num_servers(self) -> int:
        return len(self.urls) or self.count


def resolve_device(device: Literal["auto", "cpu", "cuda"], env: Mapping[str, str] | None = None) -> Device:
    """`auto` is cuda where a GPU is visible, cpu elsewhere."""
    if device == "auto":
        return "cuda" if has_gpu(env) else "cpu"
    return device


def has_gpu(env: Mapping[str, str] | None = None) -> bool:
    """Whether a GPU exists and is not hidden by CUDA_VISIBLE_DEVICES (of `env`, else of this process)."""
    visible = {**os.environ, **(env or {})}.get(VISIBLE_GPUS)
    if visible is not None and visible.strip() in ("", "-1"):
        return False
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/kfd").exists()


def to_arguments(options: Mapping[str, OptionValue]) -> list[str]:
    """Options as the command line that SGLang parses.

    `{"enable-metrics": True, "mem-fraction-static": 0.8}` is `--enable-metrics --mem-fraction-static 0.8`.
    """
    arguments: list[str] = []
    for key, value in options.items():
        flag = f"--{_dashed(key)}"
        if isinstance(value, bool):
            arguments += [flag] if value else []
        elif isinstance(value, str | int | float):
            arguments += [flag, str(value)]
        else:
            arguments += [flag, *map(str, value)]
    return arguments


def _dashed(key: str) -> str:
    return key.replace("_", "-").removeprefix("--")
