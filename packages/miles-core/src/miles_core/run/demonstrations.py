"""Demonstrations as groups, so that SFT runs through the same loop as RL.

A group is a handful of conversations drawn together; each is an episode with reward 1, which `imitate` turns into
an advantage of 1.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from miles_rollout.dispatch import GroupRequest
from miles_tito.errors import MilesError
from miles_tito.records import Episode, Group, Message, Outcome, Prompt, Trajectory
from miles_tito.records.summary import GroupRef, summarize
from miles_tito.shared.plugins import call
from miles_tito.tokens.family_choice import choose_family
from miles_tito.tokens.merge import Joiner, Setting
from miles_tito.tokens.supervised import supervised_trajectory
from miles_tito.tokens.tokenizer import load_tokenizer

from miles_core.config import SftConfig
from miles_core.durable.fingerprint import fingerprint_prompts


class DemonstrationError(MilesError, ValueError):
    """`sft.data` does not yield conversations."""


class SupervisedSource:
    """Conversations, tokenized once, drawn in a fresh order each epoch.

    Supervised training keeps one in a process of its own: `open`, then a group for each step.
    """

    def __init__(self, config: SftConfig, *, seed: int, store: Callable[[Group], Any]) -> None:
        """
        Args:
            config: `data` names a callable that returns conversations: lists of messages, or mappings with
                `messages` and `tools`.
            store: keeps a group where trainer ranks can fetch it.
        """
        self._config = config
        self._trajectories: list[Trajectory] = []
        self._seed = seed
        self._epoch = 0
        self._order: list[int] = []
        self._store = store

    def open(self, *, tokenizer: Path, family: str, skip: int = 0) -> dict[str, Any]:
        """Load and tokenize the demonstrations; returns their fingerprint, for `fingerprint.compare`.

        Args:
            skip: conversations to leave out: an earlier start of the run has trained them.

        Raises:
            DemonstrationError: `sft.data` does not yield conversations.
        """
        config = self._config
        loaded = load_tokenizer(tokenizer)
        joiner = Joiner(loaded, choose_family(family, loaded))
        assert config.data is not None, "checked with the configuration"
        conversations = call(config.data, keywords=config.data_args, what="sft.data")
        if not isinstance(conversations, Iterable):
            raise DemonstrationError(
                f"`sft.data` = {config.data!r} returned a {type(conversations).__name__}; it must return conversations."
            )
        self._trajectories = [_trajectory(joiner, c, index) for index, c in enumerate(conversations)]
        if not self._trajectories:
            raise DemonstrationError(f"`sft.data` = {config.data!r} yielded no conversation.")
        for _ in range(skip):
            self._next()
        return fingerprint_prompts(
            [Prompt(id=t.id, tokens=t.tokens, task={"mask": t.loss_mask}) for t in self._trajectories]
        )

    def group(self, request: GroupRequest) -> GroupRef:
        """The next `group_size` conversations."""
        episodes = tuple(
            Episode(
                id=f"{request.group_id}/{index}",
                prompt_id=request.prompt.id,
                group_id=request.group_id,
                outcome=Outcome.GRADED,
                reward=1.0,
                trajectories=(self._next(),),
            )
            for index in range(request.group_size)
        )
        group = Group(id=request.group_id, prompt_id=request.prompt.id, episodes=episodes)
        return summarize(group, handle=self._store(group))

    def _next(self) -> Trajectory:
        if not self._order:
            self._order = list(range(len(self._trajectories)))
            random.Random(f"{self._seed}/{self._epoch}").shuffle(self._order)
            self._epoch += 1
        return self._trajectories[self._order.pop()]


def imitate(groups: Sequence[GroupRef]) -> dict[str, float | None]:
    """Advantage 1 for every demonstration."""
    return {episode.id: 1.0 for group in groups for episode in group.episodes}


def _trajectory(joiner: Joiner, conversation: Any, index: int) -> Trajectory:
    if isinstance(conversation, Mapping):
        messages, tools = conversation.get("messages"), conversation.get("tools", ())
    else:
        messages, tools = conversation, ()
    if not isinstance(messages, Sequence) or not all(isinstance(m, dict) and "role" in m for m in messages):
        raise DemonstrationError(
            f"Conversation {index} of `sft.data` is a {type(conversation).__name__}; it must be a list of messages, or "
            "a mapping with `messages` and `tools`."
        )
    turns: Sequence[Message] = messages
    setting = Setting(tools=tuple(tools or ()))
    try:
        return supervised_trajectory(joiner, turns, id=f"demonstration-{index}", setting=setting)
    except MilesError as error:
        raise DemonstrationError(f"Conversation {index} of `sft.data` cannot be learned from: {error}") from error
