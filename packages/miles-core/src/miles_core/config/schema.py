"""The sections of a configuration. Those of a library live beside the library's code and are composed here.

Everything is a frozen dataclass; pydantic validates them as they stand (`load.py`). A value is written once: where
two parts need it, core passes it when it builds them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from miles_quant.recipe.recipe import Recipe
from miles_rollout.config import RolloutConfig
from miles_rollout.engines import EngineConfig
from miles_tito.shared.settings import SettingError, at_least
from miles_train.config import OptimizerConfig, ScheduleConfig, TrainConfig
from miles_weightsync.config import PushConfig

from miles_core.evaluation.config import EvalConfig
from miles_core.monitor.config import MonitorConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """What the run is called, and how long it goes on."""

    name: str = "run"
    """Name of the run's directory; a number is added where it is taken."""
    dir: str = "runs"
    """Where run directories are made."""
    seed: int = 0
    """Orders the prompts."""
    steps: int = 100
    """Steps of reinforcement learning; each trains one batch and updates the engines."""

    def __post_init__(self) -> None:
        if not self.name or "/" in self.name or self.name.startswith("."):
            raise SettingError(f"`name` is {self.name!r}; it names a directory, without `/` and a leading dot.")
        at_least(self, 1, "steps")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The model that is trained: a folder, or code that makes one."""

    path: str | None = None
    """Hugging Face folder: config.json, safetensors, tokenizer."""
    builder: str | None = None
    """Import string of a function that writes such a folder: `builder(path, **builder_args)`."""
    builder_args: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the builder."""
    family: str = "auto"
    """Chat template family that sessions join turns by; auto reads it off the template."""
    max_context: int | None = None
    """Most tokens of a conversation; none takes the model's own limit."""

    def __post_init__(self) -> None:
        if self.path is not None and self.builder is not None:
            raise SettingError(f"`path` is {self.path!r} and `builder` is {self.builder!r}; set one of them.")
        if self.builder_args and self.builder is None:
            raise SettingError(f"`builder_args` is {dict(self.builder_args)} but there is no `builder` to take them.")
        at_least(self, 2, "max_context")


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvConfig:
    """What the model learns to do."""

    target: str | None = None
    """Import string of a function that returns an environment, `module:function`."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of that function."""
    split: str = "train"
    """The environment's split that training draws prompts from."""
    num_prompts: int | None = None
    """Prompts to use of it; none uses all."""

    def __post_init__(self) -> None:
        if self.args and self.target is None:
            raise SettingError(f"`args` is {dict(self.args)} but there is no `target` to take them.")
        at_least(self, 1, "num_prompts")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """When the run becomes durable: what it loses when everything dies is what came after the last checkpoint."""

    every: int = 10
    """Steps between checkpoints, written while training goes on; 0 writes them only at the end and on request
    (`touch RUN/save_now`)."""
    keep: int = 2
    """Complete checkpoints to keep, the newest ones; each takes about 12 bytes a parameter in float32."""
    keep_every: int | None = None
    """Keep for good the checkpoints whose step is a multiple of this; none keeps no more than `keep`."""
    at_end: bool = True
    """Write one behind the last step, so that a finished run can go on with more steps."""

    def __post_init__(self) -> None:
        at_least(self, 0, "every")
        at_least(self, 1, "keep", "keep_every")


@dataclass(frozen=True, slots=True, kw_only=True)
class SftConfig:
    """Supervised fine-tuning: a warm-up before reinforcement learning, or the whole job of `miles sft`."""

    steps: int = 0
    """Optimizer steps; 0 is none."""
    batch_size: int = 32
    """Conversations of one step."""
    data: str | None = None
    """Import string of a function that returns conversations: `data(**data_args)`."""
    data_args: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of that function."""
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-5))
    """Used instead of `train.optimizer`."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """Used instead of `train.schedule`."""

    def __post_init__(self) -> None:
        at_least(self, 0, "steps")
        at_least(self, 1, "batch_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class RayConfig:
    """Where the processes of the run are."""

    address: str | None = None
    """A Ray cluster to join, e.g. auto or 10.0.0.1:6379; none starts one on this machine and stops it at the end."""
    num_cpus: int | None = None
    """CPUs to tell a cluster started here; none counts them."""
    object_store_bytes: int | None = None
    """Memory of a cluster started here for finished groups; none takes Ray's own choice, 30 % of the machine."""
    log_to_driver: bool = False
    """Print what actors print, beside writing it to the run's log directory."""

    def __post_init__(self) -> None:
        at_least(self, 1, "num_cpus")
        at_least(self, 80 * 2**20, "object_store_bytes")
        for name in ("num_cpus", "object_store_bytes"):
            if self.address is not None and getattr(self, name) is not None:
                raise SettingError(
                    f"`{name}` is {getattr(self, name)} but `address` is {self.address!r}: a cluster that runs already "
                    "has its own. Remove one of them."
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionsConfig:
    """The servers that record tokens between environments and engines."""

    count: int = 1
    """Session server processes; a session lives on the one that its id hashes to."""

    def __post_init__(self) -> None:
        at_least(self, 1, "count")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersConfig:
    """The processes that run environments."""

    count: int = 1
    """Worker processes; each runs its share of `rollout.max_concurrent_episodes`."""

    def __post_init__(self) -> None:
        at_least(self, 1, "count")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """One run."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012  (holds for every table below that has none)

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    env: EnvConfig = field(default_factory=EnvConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    engines: Mapping[str, EngineConfig] = field(default_factory=lambda: {"rollout": EngineConfig()})
    """A table for each kind of engine, `[engines.NAME]`."""
    train: TrainConfig = field(default_factory=TrainConfig)
    quant: Recipe | None = None
    """Low precision in training and in the engines, by one recipe; none leaves both as `train.dtype` says."""
    sync: PushConfig = field(default_factory=PushConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    ray: RayConfig = field(default_factory=RayConfig)
    sessions: SessionsConfig = field(default_factory=SessionsConfig)
    workers: WorkersConfig = field(default_factory=WorkersConfig)


def to_dict(config: Config) -> dict[str, Any]:
    """`config` as plain dicts, lists, numbers and texts, e.g. for config.json."""
    return dataclasses.asdict(config, dict_factory=lambda items: {name: _plain(value) for name, value in items})


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
