"""What every kind of loss is configured with. Importable without torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeVar

from miles_tito.shared.settings import require

Normalization = Literal["episode", "token", "dr_grpo"]

Need = Literal["reference", "entropy", "old_logprobs"]
"""What a loss may ask the trainer for: the frozen initial model's log-probs, the policy's entropy with its gradient,
the trainer's own log-probs before its first optimizer step on the batch (else those that the engine recorded)."""

NEEDS: tuple[Need, ...] = ("reference", "entropy", "old_logprobs")

F = TypeVar("F", bound=Callable[..., object])


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSettings:
    """What every `[train.loss]` has: how tokens are averaged. Each kind is a subclass with keys of its own."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012  (read by pydantic in miles-core; no dependency here)

    is_sampled: ClassVar[bool] = True
    """Whether the tokens were sampled by an engine, so that there is a ratio, and a gap, to report."""

    normalization: Normalization = "episode"
    """`episode`: mean over episodes of the mean over the episode's loss tokens (each episode weighs the same).
    `token`: mean over all loss tokens of the batch (long episodes weigh more). `dr_grpo`: sum divided by
    `max_tokens` for each episode (arXiv:2503.20783)."""
    max_tokens: int | None = None
    """The constant of `dr_grpo`: the largest number of tokens that an episode may generate."""
    log_entropy: bool = True
    """Measure the policy's entropy (one more pass over each chunk of logits)."""

    def __post_init__(self) -> None:
        require(
            self.normalization in ("episode", "token", "dr_grpo"),
            "normalization",
            self.normalization,
            "episode, token or dr_grpo",
        )
        if self.normalization == "dr_grpo":
            require(self.max_tokens is not None, "max_tokens", None, "set when `normalization` is dr_grpo")
        require(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", self.max_tokens, "at least 1")

    @property
    def needs(self) -> frozenset[Need]:
        """What the trainer computes for this loss; nothing else is computed."""
        return frozenset()

    @property
    def needs_entropy(self) -> bool:
        return self.log_entropy or "entropy" in self.needs


def needs(*names: Need) -> Callable[[F], F]:
    """Declare what a loss function of your own needs; without it, only what every loss gets.

    @needs("reference")
    def my_loss(inputs: LossInputs, *, coef: float = 0.1) -> TokenLoss: ...
    """
    for name in names:
        require(name in NEEDS, "needs", name, f"one of {', '.join(NEEDS)}")

    def mark(function: F) -> F:
        function.needs = frozenset(names)  # pyright: ignore[reportFunctionMemberAccess]  (read by CustomLoss)
        return function

    return mark
