"""Rollout: workers, the bounded group buffer, advantages, evaluation. Engines live in `miles_rollout.engines`."""

from miles_tito.shared.plugins import Plugin, resolve

from .advantages import (
    ADVANTAGES,
    AdvantageRows,
    Advantages,
    Rewards,
    advantages_by_episode,
    assign_advantages,
    dr_grpo,
    grpo,
    reinforce_pp,
    reinforce_pp_baseline,
    rloo,
)
from .buffer import GroupBuffer
from .config import RolloutConfig
from .dispatch import GroupRequest, LeastBusy, RunGroup
from .errors import (
    AdvantageError,
    BufferClosedError,
    BufferStateError,
    EmptyBatchesError,
    FailureBudgetError,
    PromptError,
    PromptsExhausted,
    RolloutConfigError,
)
from .evaluate import EvalResult, PromptScore, evaluate
from .fates import Fate, FateCounts, FateEvent, Observer
from .filters import FILTERS, Filter, compose, no_filter, no_truncated, nonzero_spread
from .policies import (
    FAILURE_POLICIES,
    MASKED_EPISODES,
    POLICIES,
    FailurePolicy,
    StalePolicy,
    Verdict,
    drop,
    drop_incomplete,
    keep,
    keep_rest,
    mask,
    retry,
    retry_group,
)
from .producer import Gate, Spool, produce
from .prompts import PromptSource, PromptState, PromptStream
from .resume import Resume, ResumedGroup, Retry
from .worker import Sessions, Worker

__all__ = [
    "ADVANTAGES",
    "FAILURE_POLICIES",
    "FILTERS",
    "MASKED_EPISODES",
    "POLICIES",
    "AdvantageError",
    "AdvantageRows",
    "Advantages",
    "BufferClosedError",
    "BufferStateError",
    "EmptyBatchesError",
    "EvalResult",
    "FailureBudgetError",
    "FailurePolicy",
    "Fate",
    "FateCounts",
    "FateEvent",
    "Filter",
    "Gate",
    "GroupBuffer",
    "GroupRequest",
    "LeastBusy",
    "Observer",
    "Plugin",
    "PromptError",
    "PromptScore",
    "PromptSource",
    "PromptState",
    "PromptStream",
    "PromptsExhausted",
    "Resume",
    "ResumedGroup",
    "Retry",
    "Rewards",
    "RolloutConfig",
    "RolloutConfigError",
    "RunGroup",
    "Sessions",
    "Spool",
    "StalePolicy",
    "Verdict",
    "Worker",
    "advantages_by_episode",
    "assign_advantages",
    "compose",
    "dr_grpo",
    "drop",
    "drop_incomplete",
    "evaluate",
    "grpo",
    "keep",
    "keep_rest",
    "mask",
    "no_filter",
    "no_truncated",
    "nonzero_spread",
    "produce",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "resolve",
    "retry",
    "retry_group",
    "rloo",
]
