"""Rewards, and the processes that compute them."""

from .exact import exact_match
from .f1 import token_f1
from .math import extract_boxed, math_equal
from .pool import RewardPool
from .score import Grader, Reward, RewardValue, Score, Scorer, answer_of, label_of, read_score

__all__ = [
    "Grader",
    "Reward",
    "RewardPool",
    "RewardValue",
    "Score",
    "Scorer",
    "answer_of",
    "exact_match",
    "extract_boxed",
    "label_of",
    "math_equal",
    "read_score",
    "token_f1",
]
