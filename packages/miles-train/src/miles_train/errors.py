"""What training refuses, and why."""

from __future__ import annotations

from miles_tito.errors import MilesError
from miles_tito.shared.settings import SettingError

ConfigError = SettingError
"""Its name before all packages shared one."""


class PackingError(MilesError, ValueError):
    """Rows cannot be packed into micro-batches as asked."""


class BatchError(MilesError, ValueError):
    """A batch contradicts itself, the model or the other ranks."""


class NumericsError(MilesError, ArithmeticError):
    """A log-prob, a loss or a gradient is not finite; the message names the sample where one is known."""


class UnsupportedModel(MilesError, NotImplementedError):
    """The model computes its scores in a way this backend would not reproduce."""


class CheckpointError(MilesError, RuntimeError):
    """A checkpoint is incomplete, missing or of another model."""


class RankError(MilesError, RuntimeError):
    """The ranks of a trainer do not form the group that the configuration asks for."""
