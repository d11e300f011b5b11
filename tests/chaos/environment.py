"""A task whose episodes are what the dice say: turns, tokens, seconds, reward; and what goes wrong in them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from miles_tito.records import Ctx, EpisodeResult, Message, Outcome, Policy, Prompt

from .world import World

LONG = 0.15
"""Share of prompts whose episodes are long."""
HANG_S = 100_000.0
SLOW_S = 60.0


class ScriptedEnv:
    """Implements `miles_tito.records.Env`."""

    def __init__(self, world: World, *, num_prompts: int) -> None:
        self._world = world
        self._num_prompts = num_prompts

    def tasks(self, split: str) -> Iterable[Prompt]:
        return self.prompts(split, self._num_prompts)

    @staticmethod
    def prompts(split: str, count: int) -> list[Prompt]:
        return [Prompt(id=f"{split}-{i}") for i in range(count)]

    async def run(self, prompt: Prompt, policy: Policy, ctx: Ctx) -> EpisodeResult:
        assert policy.session_id is not None
        fault = self._world.fault("env_raises", "env_hangs", "env_stays", "env_slow", "verifier_fails")
        kind = fault.kind if fault is not None else ""
        dice = self._world.dice
        is_long = dice("long", prompt.id) < LONG
        server = self._world.session_servers[policy.base_url]
        messages: list[Message] = [_user("ask")]
        for turn in range(1 + int(2 * dice("turns", ctx.episode_id, ctx.attempt))):
            tokens = 2 + int((24 if is_long else 5) * dice("tokens", ctx.episode_id, ctx.attempt, turn))
            reply = await server.chat(policy.session_id, messages, max_tokens=tokens)
            messages += [reply, _user("go on")]
            await asyncio.sleep(4 * dice("tool", ctx.episode_id, ctx.attempt, turn) ** 3)
            await _misbehave(kind)
        if kind == "verifier_fails":
            return EpisodeResult(outcome=Outcome.VERIFIER_INVALID, error="the verifier gave no verdict")
        return EpisodeResult(outcome=Outcome.GRADED, reward=self._reward(prompt, ctx))

    async def aclose(self) -> None:
        return None

    def _reward(self, prompt: Prompt, ctx: Ctx) -> float:
        """Every fifth prompt is always solved, the siblings of the others differ."""
        if self._world.dice("easy", prompt.id) < 0.2:
            return 1.0
        return float(int(ctx.episode_id.rsplit("/", 1)[1]) % 2 == 0)


async def _misbehave(kind: str) -> None:
    match kind:
        case "env_raises":
            raise ConnectionError("the sandbox is gone")
        case "env_hangs":
            await asyncio.sleep(HANG_S)
        case "env_stays":
            while True:
                try:
                    await asyncio.sleep(HANG_S)
                except asyncio.CancelledError:
                    continue
        case "env_slow":
            await asyncio.sleep(SLOW_S)
        case _:
            return


def _user(text: str) -> Any:
    return {"role": "user", "content": text}
