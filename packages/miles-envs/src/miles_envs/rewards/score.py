"""Calls a reward function safely, and accepts nothing but a finite number.

async def reward   awaited on the event loop, with a timeout
def reward         called in a process of the pool, which is killed when it takes too long
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import math
import numbers
import pickle
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from miles_tito.records import Message, Prompt
from miles_tito.shared import plugins

from miles_envs.errors import EnvironmentSetupError, GraderTimeout, VerifierError

from .pool import RewardPool

logger = logging.getLogger(__name__)

RewardValue = float | Mapping[str, float]
"""A number, or a mapping with the number under `reward` and other metrics beside it."""
Reward = Callable[[Prompt, Sequence[Message]], RewardValue | Awaitable[RewardValue]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The result of grading one episode: a finite reward, and other metrics."""

    reward: float
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])


class Grader:
    """Calls the reward of an environment, once for each episode that ended; `MultiTurn` has one."""

    def __init__(self, reward: Reward | str, *, pool: RewardPool | None = None, timeout_s: float = 30.0) -> None:
        """
        Args:
            reward: a callable, or its import string `"module:function"`.
            pool: processes for a plain function; without one the grader starts its own when it needs them.
            timeout_s: longest time of one call.

        Raises:
            EnvironmentSetupError: the callable cannot be found, or a plain function cannot be sent to a process.
        """
        self._reward = _resolve(reward) if isinstance(reward, str) else reward
        self._is_async = _is_async(self._reward)
        self._owns_pool = pool is None
        self._pool = pool or RewardPool()
        self._timeout_s = timeout_s
        if not self._is_async:
            _check_sendable(self._reward)

    async def grade(self, prompt: Prompt, messages: Sequence[Message], *, sample: str) -> Score:
        """The score of one conversation.

        Args:
            sample: names it in warnings and errors.

        Raises:
            VerifierError: the callable raised, took too long, crashed, or returned no finite number.
        """
        if self._is_async:
            value = await self._await(prompt, messages, sample)
        else:
            value = await self._pool.call(self._reward, prompt, list(messages), what=sample, timeout_s=self._timeout_s)
        return read_score(value, sample=sample)

    async def aclose(self) -> None:
        if self._owns_pool:
            await self._pool.aclose()

    async def _await(self, prompt: Prompt, messages: Sequence[Message], sample: str) -> Any:
        call = cast("Callable[..., Awaitable[Any]]", self._reward)
        limit = asyncio.timeout(self._timeout_s)
        try:
            async with limit:
                return await call(prompt, messages)
        except Exception as error:  # the boundary to a user's code: whatever it raises is no reward
            if isinstance(error, TimeoutError) and limit.expired():
                logger.warning("the reward of %s was given up after %g s", sample, self._timeout_s)
                raise GraderTimeout(f"The reward of {sample} took longer than {self._timeout_s:g} s.") from error
            raise VerifierError(f"The reward of {sample} raised {type(error).__name__}: {error}") from error


Scorer = Grader
"""The name it had when core and train had scorers too."""


def read_score(value: object, *, sample: str) -> Score:
    """`value` as a score; metrics that are None are left out.

    Raises:
        VerifierError: no finite number, or a mapping without one under `reward`.
    """
    if not isinstance(value, Mapping):
        return Score(reward=_finite(value, f"The reward of {sample}"))
    items = {str(key): item for key, item in cast("Mapping[Any, object]", value).items()}
    if "reward" not in items:
        raise VerifierError(
            f"The reward of {sample} is a mapping with the keys {sorted(items)} but without 'reward'; return "
            "{'reward': number, ...other metrics}."
        )
    reward = _finite(items.pop("reward"), f"The reward of {sample}")
    metrics: dict[str, float] = {}
    for key, item in items.items():
        if item is None:
            continue
        try:
            metrics[key] = _finite(item, f"Metric {key!r} of {sample}")
        except VerifierError as error:
            logger.warning("left out: %s", error)  # only watched, so the episode keeps its reward
    return Score(reward=reward, metrics=metrics)


def label_of(prompt: Prompt) -> Any:
    """`prompt.task["label"]`; 0 and "" are labels, None is not.

    Raises:
        VerifierError: there is none.
    """
    label = prompt.task.get("label")
    if label is None:
        raise VerifierError(f"Prompt {prompt.id} has no label to grade against; its task has {sorted(prompt.task)}.")
    return label


def labels_of(prompt: Prompt) -> list[Any]:
    """The labels that an answer may have: those of a list, or the one there is; errors as `label_of`."""
    label = label_of(prompt)
    return cast("list[Any]", label) if isinstance(label, list) else [label]


def answer_of(prompt: Prompt, messages: Sequence[Message]) -> str:
    """Text of the model's last message; empty when there is none. Solved examples in the prompt do not count."""
    for message in reversed(messages[len(prompt.messages or ()) :]):
        if message["role"] == "assistant":
            return message.get("content") or ""
    return ""


def _finite(value: object, what: str) -> float:
    if not isinstance(value, numbers.Real | np.bool_):
        raise VerifierError(f"{what} is {value!r} ({type(value).__name__}), not a number.")
    number = float(cast("float", value))
    if not math.isfinite(number):
        raise VerifierError(f"{what} is {number}, not a finite number.")
    return number


def _resolve(name: str) -> Reward:
    module, dot, function = name.rpartition(".")
    target = f"{module}:{function}" if dot and ":" not in name else name  # `module.function` was taken as well
    try:
        found = plugins.load(target, what="reward")
        plugins.check_call(found, 2, {}, what="reward", target=target)
    except plugins.ImportStringError as error:
        raise EnvironmentSetupError(str(error)) from error
    except ImportError as error:
        raise EnvironmentSetupError(f"`reward` is {name!r}, whose module cannot be imported: {error}.") from error
    return cast("Reward", found)


def _is_async(reward: Reward) -> bool:
    inner: Any = reward
    while isinstance(inner, functools.partial):
        inner = cast("Any", inner).func
    return inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(getattr(inner, "__call__", None))  # noqa: B004


def _check_sendable(reward: Reward) -> None:
    name = getattr(reward, "__qualname__", repr(reward))
    advice = "Define it at the top of a module that can be imported, or make it `async` to run it on the event loop."
    if getattr(reward, "__module__", None) == "__main__":
        raise EnvironmentSetupError(
            f"Reward {name} is defined in the script that was started, which worker processes do not import. {advice}"
        )
    try:
        pickle.dumps(reward)
    except Exception as error:  # pickle raises whatever an object's own methods raise
        raise EnvironmentSetupError(
            f"Reward {name} is a plain function and runs in a worker process, but cannot be sent there ({error}). "
            f"{advice}"
        ) from error
