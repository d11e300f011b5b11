"""The configuration of a run: its sections, how files and overrides become one, and how it is shown."""

from miles_core.evaluation.config import DatasetConfig, EvalConfig

from .load import Loaded, load_config
from .problems import ConfigError, Problem
from .schema import (
    CheckpointConfig,
    Config,
    EnvConfig,
    ModelConfig,
    RayConfig,
    RunConfig,
    SessionsConfig,
    SftConfig,
    WorkersConfig,
    to_dict,
)
from .show import reference, to_toml

__all__ = [
    "CheckpointConfig",
    "Config",
    "ConfigError",
    "DatasetConfig",
    "EnvConfig",
    "EvalConfig",
    "Loaded",
    "ModelConfig",
    "Problem",
    "RayConfig",
    "RunConfig",
    "SessionsConfig",
    "SftConfig",
    "WorkersConfig",
    "load_config",
    "reference",
    "to_dict",
    "to_toml",
]
