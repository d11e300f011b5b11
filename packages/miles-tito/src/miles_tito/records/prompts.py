"""What an episode starts from: a prompt, how to sample, and where the policy is to be reached."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from miles_tito.errors import RecordError

from .arrays import readonly

Message = dict[str, Any]
"""One chat message in the OpenAI form: role, content, tool_calls, tool_call_id, …"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the policy samples. `temperature` is also the one that the trainer scores with."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012  (read by pydantic in miles-core; no dependency here)

    temperature: float = 1.0
    """Softmax temperature; log-probs are recorded at it, before top-k and top-p."""
    top_p: float = 1.0
    top_k: int = -1
    """-1 keeps the whole vocabulary."""
    min_p: float = 0.0
    max_tokens: int = 512
    """Upper bound on the tokens of one turn."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise RecordError(f"`temperature` is {self.temperature}; it must be 0 (greedy) or more.")
        if not 0 < self.top_p <= 1:
            raise RecordError(f"`top_p` is {self.top_p}; it must lie in (0, 1].")
        if self.top_k == 0 or self.top_k < -1:
            raise RecordError(f"`top_k` is {self.top_k}; use -1 for the whole vocabulary or a positive number.")
        if not 0 <= self.min_p <= 1:
            raise RecordError(f"`min_p` is {self.min_p}; it must lie in [0, 1].")
        if self.max_tokens < 1:
            raise RecordError(f"`max_tokens` is {self.max_tokens}; a turn needs at least 1 token.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One problem: what the policy sees first, and what the environment needs to grade it."""

    id: str
    messages: tuple[Message, ...] | None = None
    tokens: np.ndarray | None = None
    """[P] int32, for environments that work on ids instead of messages."""
    task: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Plain data for the environment: label, files, limits."""
    images: tuple[Any, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        if not self.id:
            raise RecordError("A Prompt needs a non-empty `id`; groups, the ledger and resume are keyed by it.")
        if self.tokens is not None:
            object.__setattr__(self, "tokens", readonly(self.tokens, np.int32, "tokens", ndim=1))
        if self.messages is not None:
            object.__setattr__(self, "messages", tuple(self.messages))


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What an agent needs to talk to its session: point any OpenAI client at `base_url`."""

    base_url: str
    """Ends in `/v1`; append `/chat/completions`."""
    api_key: str
    model: str
    sampling: Sampling = field(default_factory=Sampling)
    session_id: str = ""
