"""Tasks of one question and one answer."""

from __future__ import annotations

from collections.abc import Sequence

from miles_tito.records import Message

from miles_envs.prompts import Prompts
from miles_envs.rewards.pool import RewardPool
from miles_envs.rewards.score import Reward

from .multi_turn import Dialogue, MultiTurn


class SingleTurn(MultiTurn):
    """The model answers once and is graded."""

    def __init__(
        self,
        *,
        prompts: Prompts,
        reward: Reward | str,
        reward_timeout_s: float = 30.0,
        pool: RewardPool | None = None,
    ) -> None:
        """Arguments as for `MultiTurn`."""
        super().__init__(prompts=prompts, reward=reward, max_turns=1, reward_timeout_s=reward_timeout_s, pool=pool)

    async def reply(self, dialogue: Dialogue) -> Sequence[Message]:
        return ()
