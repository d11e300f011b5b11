"""Environments, rewards and data readers for reinforcement learning of language models."""

from .chat import ChatClient, Completion, connection_pool
from .data import Columns, from_generator, read_jsonl, read_parquet, read_prompts
from .endpoints import EndpointPool, EndpointState
from .errors import (
    ContextExceeded,
    DataError,
    EndpointError,
    EnvironmentSetupError,
    GraderCrash,
    GraderTimeout,
    InfraError,
    VerifierError,
)
from .reasoning import ReasoningGym, reasoning_gym
from .rewards import RewardPool, exact_match, extract_boxed, math_equal, token_f1
from .shapes import Dialogue, MultiTurn, SingleTurn, Tool, ToolLoop

__all__ = [
    "ChatClient",
    "Columns",
    "Completion",
    "ContextExceeded",
    "DataError",
    "Dialogue",
    "EndpointError",
    "EndpointPool",
    "EndpointState",
    "EnvironmentSetupError",
    "GraderCrash",
    "GraderTimeout",
    "InfraError",
    "MultiTurn",
    "ReasoningGym",
    "RewardPool",
    "SingleTurn",
    "Tool",
    "ToolLoop",
    "VerifierError",
    "connection_pool",
    "exact_match",
    "extract_boxed",
    "from_generator",
    "math_equal",
    "read_jsonl",
    "read_parquet",
    "read_prompts",
    "reasoning_gym",
    "token_f1",
]
