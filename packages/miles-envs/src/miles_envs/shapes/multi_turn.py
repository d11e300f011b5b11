"""The base of every shape: model and environment take turns until one of them ends the episode, then it is graded.

begin ─▶ model turn ─▶ reply ─▶ model turn ─▶ reply → no message: GRADED
             │
   turns, tokens, context or time used up: POLICY_LIMIT, graded as it stands
   the session or a tool's machinery broke: INFRA_ABORT     the grader failed: VERIFIER_INVALID
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from miles_tito.records import Ctx, EpisodeResult, Message, Outcome, Policy, Prompt

from miles_envs.chat import ChatClient, ConnectionPool, connection_pool
from miles_envs.errors import (
    ContextExceeded,
    DeadlineReached,
    EnvironmentSetupError,
    EpisodeCancelled,
    InfraError,
    VerifierError,
)
from miles_envs.limits import bounded, check
from miles_envs.prompts import Prompts, prompts_of
from miles_envs.rewards.pool import RewardPool
from miles_envs.rewards.score import Grader, Reward


@dataclass(slots=True, kw_only=True)
class Dialogue:
    """The state of one episode while it runs; `MultiTurn` passes it to `begin`, `reply` and `end`."""

    prompt: Prompt
    ctx: Ctx
    messages: list[Message]
    """Everything said so far."""
    tools: Sequence[Mapping[str, Any]] = ()
    """OpenAI tool schemas that the model may call."""
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    """What the environment counts; goes into the episode's result."""
    state: object = None
    """The environment's own, set in `begin`."""


class MultiTurn(ABC):
    """An environment that answers the model until an end; a subclass writes `reply`, and `begin` and `end` if needed.

    A worker calls `run` once an episode, many of them at a time on one event loop, and `aclose` at the end.
    """

    def __init__(
        self,
        *,
        prompts: Prompts,
        reward: Reward | str,
        max_turns: int,
        reward_timeout_s: float = 30.0,
        pool: RewardPool | None = None,
    ) -> None:
        """
        Args:
            prompts: source of each split: prompts, a function that returns them, or a file such as
                `"data.jsonl@[0:900]"`.
            reward: `(prompt, messages)` to a number, or to a mapping with `reward` and further metrics; or its import
                string. An `async` one is awaited, a plain one runs in a process of the pool. The messages end with
                the model's last one.
            max_turns: model turns of an episode.
            reward_timeout_s: longest time of one grading.
            pool: processes shared with other environments.
        """
        if max_turns < 1:
            raise EnvironmentSetupError(f"`max_turns` is {max_turns}; an episode has at least 1 turn of the model.")
        if not isinstance(prompts, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]  (a user's mistake)
            raise EnvironmentSetupError(
                f"`prompts` is a {type(prompts).__name__}; name the splits: {{'train': ..., 'heldout': ...}}."
            )
        self._prompts = prompts
        self._max_turns = max_turns
        self._grader = Grader(reward, pool=pool, timeout_s=reward_timeout_s)
        self._connections: ConnectionPool | None = None

    @abstractmethod
    async def reply(self, dialogue: Dialogue) -> Sequence[Message]:
        """The environment's messages after the model's last one; none ends the episode.

        Raises:
            InfraError: something broke that the model cannot cause.
        """

    async def begin(self, dialogue: Dialogue) -> None:  # noqa: B027  (a hook)
        """Prepare an episode: set `state`, `tools`, or change `messages`."""

    async def end(self, dialogue: Dialogue) -> None:  # noqa: B027  (a hook)
        """Clean up after an episode, however it ended, also where `begin` did not finish."""

    def tasks(self, split: str) -> Iterable[Prompt]:
        """The prompts of `split`."""
        return prompts_of(self._prompts, split)

    async def run(self, prompt: Prompt, policy: Policy, ctx: Ctx) -> EpisodeResult:
        """One episode of `prompt` against `policy`."""
        if not prompt.messages:
            raise EnvironmentSetupError(f"Prompt {prompt.id} has no messages, which {type(self).__name__} starts from.")
        self._connections = self._connections or connection_pool()
        chat = ChatClient(policy, pool=self._connections)
        dialogue = Dialogue(prompt=prompt, ctx=ctx, messages=list(prompt.messages))
        try:
            try:
                outcome = await self._converse(dialogue, chat)
                return await self._grade(dialogue, outcome)
            finally:
                await self.end(dialogue)
        except EpisodeCancelled:
            return _result(dialogue, Outcome.CANCELLED)
        except InfraError as error:
            ended = ctx.cancelled.is_set()  # then the session was closed on purpose
            return _result(dialogue, Outcome.CANCELLED if ended else Outcome.INFRA_ABORT, error=str(error))
        except VerifierError as error:
            return _result(dialogue, Outcome.VERIFIER_INVALID, error=str(error))

    async def aclose(self) -> None:
        """Close connections and grader processes."""
        connections, self._connections = self._connections, None
        if connections is not None:
            await connections.close()
        await self._grader.aclose()

    async def _converse(self, dialogue: Dialogue, chat: ChatClient) -> Outcome:
        """Converse until the end: GRADED if the episode came to it, POLICY_LIMIT if a limit came first."""
        try:
            await bounded(self.begin(dialogue), dialogue.ctx)
            for turn in range(1, self._max_turns + 1):
                answer = await bounded(chat.complete(dialogue.messages, tools=dialogue.tools), dialogue.ctx)
                dialogue.messages.append(answer.message)
                dialogue.metrics["turns"] = turn
                if answer.is_truncated:
                    return Outcome.POLICY_LIMIT
                replies = await bounded(self.reply(dialogue), dialogue.ctx)
                if not replies:
                    return Outcome.GRADED
                dialogue.messages.extend(replies)
        except (ContextExceeded, DeadlineReached):
            return Outcome.POLICY_LIMIT
        return Outcome.POLICY_LIMIT

    async def _grade(self, dialogue: Dialogue, outcome: Outcome) -> EpisodeResult:
        ctx = dialogue.ctx
        with contextlib.suppress(DeadlineReached):  # reached in time to be graded
            check(ctx)
        sample = f"episode {ctx.episode_id} of prompt {dialogue.prompt.id}"
        score = await self._grader.grade(dialogue.prompt, _until_last_answer(dialogue), sample=sample)
        return _result(dialogue, outcome, reward=score.reward, metrics=score.metrics)


def _until_last_answer(dialogue: Dialogue) -> list[Message]:
    """The conversation without what the model never answered: a tool's result must not pass for its answer."""
    messages = list(dialogue.messages)
    while len(messages) > len(dialogue.prompt.messages or ()) and messages[-1]["role"] != "assistant":
        messages.pop()
    return messages


def _result(
    dialogue: Dialogue,
    outcome: Outcome,
    *,
    reward: float | None = None,
    metrics: Mapping[str, float] | None = None,
    error: str | None = None,
) -> EpisodeResult:
    return EpisodeResult(outcome=outcome, reward=reward, metrics={**dialogue.metrics, **(metrics or {})}, error=error)
