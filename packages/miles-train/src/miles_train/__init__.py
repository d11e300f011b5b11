"""Packing, policy losses and the FSDP2 trainer. Importing this package does not import torch."""

from .batch import Batch, BatchTotals, MicroBatch, make_batch
from .build import create_trainer
from .config import LossConfig, OptimizerConfig, ScheduleConfig, TrainConfig
from .errors import (
    BatchError,
    CheckpointError,
    ConfigError,
    NumericsError,
    PackingError,
    RankError,
    UnsupportedModel,
)
from .packing import pack
from .plan import Row, StepPlan, batches_of, plan_batch
from .sft import sft_sample
from .trainer import Layout, Shard, StepResult, Trainer, score

__all__ = [
    "Batch",
    "BatchError",
    "BatchTotals",
    "CheckpointError",
    "ConfigError",
    "Layout",
    "LossConfig",
    "MicroBatch",
    "NumericsError",
    "OptimizerConfig",
    "PackingError",
    "RankError",
    "Row",
    "ScheduleConfig",
    "Shard",
    "StepPlan",
    "StepResult",
    "TrainConfig",
    "Trainer",
    "UnsupportedModel",
    "batches_of",
    "create_trainer",
    "make_batch",
    "pack",
    "plan_batch",
    "score",
    "sft_sample",
]
