"""Tasks in which the model calls tools, reads their results, and answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from miles_tito.records import Message

from miles_envs.errors import EnvironmentSetupError
from miles_envs.prompts import Prompts
from miles_envs.rewards.pool import RewardPool
from miles_envs.rewards.score import Reward

from .multi_turn import Dialogue, MultiTurn
from .tools import ToolError, tools_by_name


class ToolLoop(MultiTurn):
    """An environment with tools; an episode ends with the first answer that calls none.

    A tool called wrongly answers with the error, so that the model can mend it. Counts `tool_calls` and `tool_errors`.
    """

    def __init__(
        self,
        *,
        prompts: Prompts,
        tools: Sequence[Callable[..., Any]],
        reward: Reward | str,
        max_turns: int = 10,
        tool_timeout_s: float = 30.0,
        max_result_chars: int = 20_000,
        reward_timeout_s: float = 30.0,
        pool: RewardPool | None = None,
    ) -> None:
        """
        Args:
            tools: plain functions, sync (each call in a thread) or async; their type hints become the JSON schema.
            max_turns: model turns; one that still calls a tool in the last is graded as it stands.
            tool_timeout_s: longest time of one call; the model is told when it is over.
            max_result_chars: a longer result is cut, and says so.

        The other arguments are those of `MultiTurn`.
        """
        super().__init__(
            prompts=prompts, reward=reward, max_turns=max_turns, reward_timeout_s=reward_timeout_s, pool=pool
        )
        if not tools:
            raise EnvironmentSetupError("`tools` is empty; use SingleTurn where the model needs none.")
        self._tools = tools_by_name(tools)
        self._tool_timeout_s = tool_timeout_s
        self._max_result_chars = max_result_chars

    async def begin(self, dialogue: Dialogue) -> None:
        dialogue.tools = [tool.schema for tool in self._tools.values()]
        dialogue.metrics.update(tool_calls=0, tool_errors=0)

    async def reply(self, dialogue: Dialogue) -> Sequence[Message]:
        """The result of each call of the last message, in their order."""
        return [await self._answer(call, dialogue) for call in dialogue.messages[-1].get("tool_calls") or ()]

    async def _answer(self, call: Mapping[str, Any], dialogue: Dialogue) -> Message:
        name, arguments = call["function"]["name"], call["function"].get("arguments") or "{}"
        dialogue.metrics["tool_calls"] += 1
        try:
            if name not in self._tools:
                raise ToolError(f"there is no tool {name!r}; there is {', '.join(self._tools)}")
            text = await self._tools[name].call(arguments, timeout_s=self._tool_timeout_s)
        except ToolError as error:
            dialogue.metrics["tool_errors"] += 1
            text = f"error: {error}"
        return {"role": "tool", "tool_call_id": call["id"], "content": self._cut(text)}

    def _cut(self, text: str) -> str:
        surplus = len(text) - self._max_result_chars
        return text if surplus <= 0 else f"{text[: self._max_result_chars]}\n[{surplus} more characters cut]"
