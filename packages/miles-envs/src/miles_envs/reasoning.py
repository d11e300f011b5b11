"""Procedural tasks of reasoning-gym, scored by its own scorers."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from miles_tito.records import Message, Prompt

from .errors import EnvironmentSetupError
from .optional import require
from .rewards.score import answer_of
from .shapes import SingleTurn

UNSOUND = {
    **dict.fromkeys(
        ("boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"), "its own answer scores 0"
    ),
    "prime_factorization": "its scorer raises on malformed answers",
    "game_of_life_halting": "its scorer pays for malformed answers",
}
"""Tasks of reasoning-gym 0.1.25 that no policy should be trained on, with the reason."""

SEED_STRIDE = 1_000_003
"""Problem i of its seed s is problem i - 1 of its seed s + 1: neighbouring seeds would share nearly all problems."""

INSTRUCTION = "Give only the final answer between <answer> and </answer>."
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def reasoning_gym(name: str, *, seed: int = 0, size: int = 500, **options: Any) -> list[Prompt]:
    """`size` problems of the task `name`, the same for the same arguments.

    Args:
        options: difficulty settings of the task.

    Raises:
        EnvironmentSetupError: no such task or option, or one whose scorer is unsound.
        MissingDependency: reasoning-gym is not installed.
    """
    if name in UNSOUND:
        raise EnvironmentSetupError(f"Task {name!r} of reasoning-gym cannot be trained on: {UNSOUND[name]}.")
    settings = {"name": name, "seed": seed, "size": size, "options": options}
    dataset = _dataset(json.dumps(settings, sort_keys=True))
    return [
        Prompt(
            id=f"{name}-{seed}-{index}",
            messages=({"role": "user", "content": f"{dataset[index]['question']}\n\n{INSTRUCTION}"},),
            # The scorer's entry is made again from these: its metadata does not survive as plain data.
            task={**settings, "index": index, "label": str(dataset[index]["answer"])},
        )
        for index in range(size)
    ]


def reasoning_gym_score(prompt: Prompt, messages: Sequence[Message]) -> float:
    """What the task's own scorer gives for the last `<answer>` of the last message; 0 without one."""
    found = _ANSWER.findall(answer_of(prompt, messages))
    if not found:
        return 0.0
    task = prompt.task
    settings = {key: task[key] for key in ("name", "seed", "size", "options")}
    dataset = _dataset(json.dumps(settings, sort_keys=True))
    return float(dataset.score_answer(found[-1].strip(), entry=dataset[task["index"]]))


class ReasoningGym(SingleTurn):
    """One task of reasoning-gym, with held-out problems from another seed."""

    def __init__(
        self,
        *,
        name: str,
        seed: int = 0,
        size: int = 500,
        heldout_size: int = 100,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """Arguments as for `reasoning_gym`; a held-out problem that is also among the training ones is left out."""
        settings = dict(options or {})
        train = reasoning_gym(name, seed=seed, size=size, **settings)
        seen = {_question(prompt) for prompt in train}
        other = reasoning_gym(name, seed=seed + 1, size=heldout_size, **settings)
        heldout = [prompt for prompt in other if _question(prompt) not in seen]
        if not heldout:
            raise EnvironmentSetupError(
                f"All {heldout_size} held-out problems of {name!r} are among the {size} training ones: with these "
                "options the task has too few. Take fewer for training, or options that make more of them."
            )
        super().__init__(prompts={"train": train, "heldout": heldout}, reward=reasoning_gym_score)


def _question(prompt: Prompt) -> str:
    assert prompt.messages, "reasoning_gym() makes prompts of messages"
    return str(prompt.messages[-1]["content"])


@functools.lru_cache(maxsize=8)
def _dataset(settings: str) -> Any:
    gym = require("reasoning_gym", extra="reasoning-gym")
    wanted = json.loads(settings)
    try:
        return gym.create_dataset(
            wanted["name"], seed=wanted["seed"] * SEED_STRIDE, size=wanted["size"], **wanted["options"]
        )
    except (ValueError, TypeError, AssertionError) as error:
        raise EnvironmentSetupError(f"reasoning-gym cannot make {wanted['name']!r}: {error}") from error
