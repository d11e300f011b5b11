"""Held-out prompts through the same machinery as training: avg@k and pass@k with intervals, and failures."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from miles_tito import UNKNOWN_VERSION, GroupRef, Prompt, Sampling

from .dispatch import GroupRequest, RunGroup
from .errors import PromptError, first_line
from .intervals import Interval, mean, mean_interval, share_interval, standard_error


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptScore:
    """What one prompt of an evaluation was worth."""

    prompt_id: str
    rewards: tuple[float, ...]
    """Of the episodes that got one, as the environment gave them."""
    num_failed: int
    versions: tuple[int, ...] = ()
    """Weight versions at which its trajectories began and ended."""

    @property
    def mean(self) -> float | None:
        """avg@k of this prompt, None when every episode failed."""
        return math.fsum(self.rewards) / len(self.rewards) if self.rewards else None


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """Scores of one evaluation, as `evaluate` returns them. A failed episode is counted as failed, never scored 0."""

    name: str
    samples_per_prompt: int
    prompts: tuple[PromptScore, ...]
    failures: Mapping[str, int]
    """Failed episodes by the first line of their error."""
    success_reward: float
    """A reward of at least this much is a pass."""
    env_metrics: Mapping[str, float]
    """Mean of each metric over the episodes that report it."""
    seconds: float

    @property
    def num_episodes(self) -> int:
        return self.num_scored + self.num_failed

    @property
    def num_scored(self) -> int:
        return sum(len(prompt.rewards) for prompt in self.prompts)

    @property
    def num_failed(self) -> int:
        return sum(prompt.num_failed for prompt in self.prompts)

    @property
    def mean(self) -> float | None:
        """avg@k: each prompt counts once, over the prompts that have a score; None when none has."""
        return mean(self._means())

    @property
    def stderr(self) -> float | None:
        """Standard error of `mean`, clustered by prompt; None below two scored prompts."""
        return standard_error(self._means())

    @property
    def interval(self) -> Interval | None:
        """95 % confidence interval of `mean`: Wilson's where every reward lies in [0, 1], Student's otherwise."""
        means = self._means()
        is_share = all(0.0 <= reward <= 1.0 for prompt in self.prompts for reward in prompt.rewards)
        return share_interval(means) if is_share else mean_interval(means)

    @property
    def versions(self) -> tuple[int, int] | None:
        """Oldest and newest weight version of any sampled token; None where the engine named none."""
        found = [v for prompt in self.prompts for v in prompt.versions if v >= 0]
        return (min(found), max(found)) if found else None

    def pass_at(self, k: int) -> float | None:
        """Unbiased pass@k, 1 - C(n - c, k) / C(n, k) (arXiv:2107.03374 §2.1), over prompts with n ≥ k scores."""
        return mean(self._pass_values(k))

    def pass_interval(self, k: int) -> Interval | None:
        """95 % confidence interval of `pass_at(k)`, clustered by prompt; None below two prompts with k scores."""
        return share_interval(self._pass_values(k))

    def metrics(self, *, prefix: str = "eval") -> dict[str, float]:
        """As metrics named `<prefix>/<what>`; a score that does not exist is absent rather than 0."""
        numbers: dict[str, float | None] = {
            "score": self.mean,
            "stderr": self.stderr,
            **_ends("score", self.interval),
            "episodes": float(self.num_episodes),
            "failed": self.num_failed / self.num_episodes if self.num_episodes else None,
            "prompts_without_score": float(sum(not prompt.rewards for prompt in self.prompts)),
            "seconds": self.seconds,
            **self.env_metrics,
        }
        for k in _powers_of_two(self.samples_per_prompt):
            numbers |= {f"pass@{k}": self.pass_at(k), **_ends(f"pass@{k}", self.pass_interval(k))}
        return {f"{prefix}/{key}": value for key, value in numbers.items() if value is not None}

    def summary(self) -> str:
        """One line for people."""
        if self.mean is None:
            score = "no score"
        else:
            score = f"{self.mean:.3f}" + ("" if self.stderr is None else f" ± {self.stderr:.3f}")
        text = f"{self.name}: {score} on {len(self.prompts)} prompts, {self.samples_per_prompt} samples each"
        return f"{text}; {self.why_failed()}" if self.num_failed else text

    def why_failed(self) -> str:
        """How many episodes failed, and the most common cause."""
        cause, count = max(self.failures.items(), key=lambda item: item[1], default=("none", 0))
        return f"{self.num_failed} of {self.num_episodes} episodes failed, {count} with: {cause}"

    def _means(self) -> list[float]:
        return [prompt.mean for prompt in self.prompts if prompt.mean is not None]

    def _pass_values(self, k: int) -> list[float]:
        """pass@k of each prompt that has k scores."""
        if not 1 <= k <= self.samples_per_prompt:
            raise ValueError(f"pass@{k} needs 1 ≤ k ≤ {self.samples_per_prompt}, the samples per prompt.")
        return [
            1.0 - math.comb(n - passed, k) / math.comb(n, k)
            for prompt in self.prompts
            if (n := len(prompt.rewards)) >= k
            for passed in [sum(reward >= self.success_reward for reward in prompt.rewards)]
        ]


async def evaluate(
    prompts: Sequence[Prompt],
    *,
    run_group: RunGroup,
    samples_per_prompt: int = 1,
    sampling: Sampling | None = None,
    name: str = "eval",
    tag: str = "0",
    success_reward: float = 1.0,
) -> EvalResult:
    """Run `samples_per_prompt` episodes of every prompt; the workers' permits bound how many run at once.

    Args:
        run_group: what the producer uses too. Close its `Gate` meanwhile where both share engines.
        sampling: other than training's, for example greedy.
        name: of the data set, in metrics and ids.
        tag: makes session ids unique between evaluations of one run, for example the weight version.
        success_reward: a reward of at least this much is a pass.
    """
    if not prompts:
        raise PromptError(f"Evaluation {name!r} has no prompts; give some or switch the evaluation off.")
    if samples_per_prompt < 1:
        raise ValueError(f"`samples_per_prompt` is {samples_per_prompt}; it must be at least 1.")
    clock = asyncio.get_running_loop().time
    started = clock()
    async with asyncio.TaskGroup() as running:
        tasks = [
            running.create_task(
                run_group(
                    GroupRequest(
                        prompt=prompt, group_id=f"{name}-{tag}-{i}", group_size=samples_per_prompt, sampling=sampling
                    )
                )
            )
            for i, prompt in enumerate(prompts)
        ]
    refs = [task.result() for task in tasks]
    return EvalResult(
        name=name,
        samples_per_prompt=samples_per_prompt,
        prompts=tuple(_score(ref) for ref in refs),
        failures=_failures(refs),
        success_reward=success_reward,
        env_metrics=_env_metrics(refs),
        seconds=clock() - started,
    )


def _score(ref: GroupRef) -> PromptScore:
    rewards = tuple(reward for reward in ref.rewards if reward is not None)
    trajectories = [trajectory for episode in ref.episodes for trajectory in episode.trajectories]
    trained = [t for t in trajectories if t.num_loss_tokens]
    named = (v for t in trained for v in (t.oldest_version, t.newest_version))
    versions = {UNKNOWN_VERSION if version is None else version for version in named}
    return PromptScore(
        prompt_id=ref.prompt_id,
        rewards=rewards,
        num_failed=len(ref.rewards) - len(rewards),
        versions=tuple(sorted(versions)),
    )


def _failures(refs: Sequence[GroupRef]) -> dict[str, int]:
    failed = (e for ref in refs for e in ref.episodes if e.reward is None)
    return dict(Counter(f"{e.outcome}: {first_line(e.error)}" for e in failed))


def _env_metrics(refs: Sequence[GroupRef]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for episode in (e for ref in refs for e in ref.episodes):
        for key, value in episode.metrics.items():
            values.setdefault(key, []).append(value)
    return {key: math.fsum(numbers) / len(numbers) for key, numbers in values.items()}


def _powers_of_two(limit: int) -> list[int]:
    return [2**i for i in range(limit.bit_length())]


def _ends(name: str, interval: Interval | None) -> dict[str, float | None]:
    return {f"{name}_low": interval.low, f"{name}_high": interval.high} if interval is not None else {}
