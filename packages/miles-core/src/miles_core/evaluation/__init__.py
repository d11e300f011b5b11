"""Evaluation of versions of the weights: on the rollout engines, on engines of its own, or by code of the user's.

    step ─▶ Evaluator.begin ─▶ … ─▶ EvalPoint ─▶ ledger, log, metrics of that step

Whatever goes wrong is a skipped point with its reason: no exception in the loop, and never a score of 0.
"""

from .background import BackgroundEvaluator, Snapshots
from .config import DatasetConfig, EvalConfig, EvalConfigError
from .dedicated import DedicatedScorer, EvalServing
from .evaluator import Evaluator, NoEvaluator
from .external import ExternalScorer
from .points import DatasetScore, EvalLog, EvalPoint
from .scoring import Conversations, Scorer
from .shared import InFlight, SharedEvaluator

__all__ = [
    "BackgroundEvaluator",
    "Conversations",
    "DatasetConfig",
    "DatasetScore",
    "DedicatedScorer",
    "EvalConfig",
    "EvalConfigError",
    "EvalLog",
    "EvalPoint",
    "EvalServing",
    "Evaluator",
    "ExternalScorer",
    "InFlight",
    "NoEvaluator",
    "Scorer",
    "SharedEvaluator",
    "Snapshots",
]
