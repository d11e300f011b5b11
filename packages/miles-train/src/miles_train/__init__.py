"""Packing, policy losses and the FSDP2 trainer. Importing this package does not import torch."""

from .backends.fsdp import FSDPConfig
from .batch import Batch, BatchTotals, MicroBatch, make_batch
from .config import OptimizerConfig, ScheduleConfig, TrainConfig
from .create import check_backend, create_trainer
from .errors import (
    BatchError,
    CheckpointError,
    ConfigError,
    NumericsError,
    PackingError,
    RankError,
    UnsupportedModel,
)
from .losses import CustomLoss, LossConfig, PolicyLoss, SftLoss
from .packing import pack
from .plan import Row, StepPlan, batches_of, plan_batch
from .sft import sft_sample
from .trainer import Layout, Shard, StepResult, Trainer, check_layouts, score

__all__ = [
    "Batch",
    "BatchError",
    "BatchTotals",
    "CheckpointError",
    "ConfigError",
    "CustomLoss",
    "FSDPConfig",
    "Layout",
    "LossConfig",
    "MicroBatch",
    "NumericsError",
    "OptimizerConfig",
    "PackingError",
    "PolicyLoss",
    "RankError",
    "Row",
    "ScheduleConfig",
    "SftLoss",
    "Shard",
    "StepPlan",
    "StepResult",
    "TrainConfig",
    "Trainer",
    "UnsupportedModel",
    "batches_of",
    "check_backend",
    "check_layouts",
    "create_trainer",
    "make_batch",
    "pack",
    "plan_batch",
    "score",
    "sft_sample",
]
