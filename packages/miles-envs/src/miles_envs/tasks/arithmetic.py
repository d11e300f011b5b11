"""Sums for small models: with a tool in two turns, or as JSON after two solved examples.

Problems are split by a hash of their operands, in either order, so that `17+25` and `25+17` are both trained on or both
held out. Everything shown in training (questions, tool calls, solved examples) is drawn from the training side.
"""

from __future__ import annotations

import json
import random
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from miles_tito.records import Message, Prompt

from miles_envs.rewards.exact import exact_match
from miles_envs.rewards.score import answer_of
from miles_envs.shapes import SingleTurn, Tool, ToolLoop

Pair = tuple[int, int]


def is_heldout(pair: Pair, *, one_in: int) -> bool:
    """Whether the sum of this pair, in either order, is never trained on; one pair in `one_in` is not."""
    return zlib.crc32(f"{min(pair)}+{max(pair)}".encode()) % one_in == 0


def pairs(split: str, operands: range, *, one_in: int) -> list[Pair]:
    """All pairs of `operands` on one side of the split, `train` or `heldout`, in a mixed but fixed order."""
    wanted = {"train": False, "heldout": True}[split]
    found = [(a, b) for a in operands for b in operands if is_heldout((a, b), one_in=one_in) is wanted]
    random.Random(0).shuffle(found)
    return found


def add(a: int, b: int) -> int:
    """Add two integers."""
    return a + b


async def answer_is_label(prompt: Prompt, messages: Sequence[Message]) -> float:
    """`exact_match` on the event loop: comparing two short texts needs no process."""
    return exact_match(prompt, messages)


class ToolSum(ToolLoop):
    """Two turns: call `add` with the operands of the question, then copy what it returned."""

    operands = range(10, 100)
    one_in = 10

    def __init__(self) -> None:
        super().__init__(
            prompts={split: _tool_sums(split) for split in ("train", "heldout")},
            tools=[add],
            reward=answer_is_label,
            max_turns=2,
        )


class JsonSum(SingleTurn):
    """A sum answered as `{"answer": 42}`, after two solved examples."""

    operands = range(1, 13)
    one_in = 5
    variants = 4
    """Prompts of one sum, each with other solved examples."""

    def __init__(self, *, seed: int = 0) -> None:
        """
        Args:
            seed: draws the solved examples of each problem.
        """
        super().__init__(
            prompts={split: _json_sums(split, seed) for split in ("train", "heldout")}, reward=json_answer_is_label
        )


async def json_answer_is_label(prompt: Prompt, messages: Sequence[Message]) -> Mapping[str, float]:
    """1 for exactly the JSON object asked for; `is_json` is 1 for a wrong sum in the right form too."""
    form = re.fullmatch(r'\{"answer": ?(\d+)\}', answer_of(prompt, messages).strip())
    return {
        "reward": float(form is not None and int(form[1]) == prompt.task["label"]),
        "is_json": float(form is not None),
    }


def sft_conversations(
    *, seed: int = 0, n: int = 4000, use_tool: float = 0.4, bad_call: float = 0.25, bad_copy: float = 0.2
) -> Iterator[dict[str, Any]]:
    """Demonstrations of `ToolSum` for a warm-up, wrong on purpose: they teach the form of a call, not the sums.

    Args:
        n: number of conversations.
        use_tool: share that calls the tool; the others answer at once with a number near the sum.
        bad_call: share of the calls with a wrong digit.
        bad_copy: share of the last answers with a wrong digit.

    Returns:
        Mappings with `messages` and `tools`.
    """
    rng = random.Random(seed)
    problems = pairs("train", ToolSum.operands, one_in=ToolSum.one_in)
    tools = [Tool(add).schema]
    for _ in range(n):
        pair = rng.choice(problems)
        question: Message = {"role": "user", "content": _question(pair)}
        if rng.random() < use_tool:
            called = _wrong_pair(pair, rng) if rng.random() < bad_call else pair
            result = str(sum(called))
            answer = _wrong_digit(result, rng) if rng.random() < bad_copy else result
            turns = [_call(called), {"role": "tool", "tool_call_id": "call_0", "content": result}, _say(answer)]
        else:
            turns = [_say(str(max(0, sum(pair) + rng.randrange(-20, 21))))]
        yield {"messages": [question, *turns], "tools": tools}


def _tool_sums(split: str) -> list[Prompt]:
    return [
        Prompt(
            id=f"{a}+{b}",
            messages=({"role": "user", "content": _question((a, b))},),
            task={"label": a + b},
        )
        for a, b in pairs(split, ToolSum.operands, one_in=ToolSum.one_in)
    ]


def _json_sums(split: str, seed: int) -> list[Prompt]:
    rng = random.Random(seed)
    solved = pairs("train", JsonSum.operands, one_in=JsonSum.one_in)
    return [
        Prompt(
            id=f"json-{a}+{b}-{variant}",
            messages=(
                {"role": "system", "content": "You are a helpful assistant."},
                *(
                    message
                    for c, d in rng.sample([pair for pair in solved if set(pair) != {a, b}], 2)
                    for message in ({"role": "user", "content": f"{c} + {d}"}, _say(json.dumps({"answer": c + d})))
                ),
                {"role": "user", "content": f"{a} + {b}"},
            ),
            task={"label": a + b},
        )
        for variant in range(JsonSum.variants)
        for a, b in pairs(split, JsonSum.operands, one_in=JsonSum.one_in)
    ]


def _question(pair: Pair) -> str:
    return f"{pair[0]}+{pair[1]}=?"


def _say(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _call(pair: Pair) -> Message:
    arguments = json.dumps({"a": pair[0], "b": pair[1]})
    call = {"id": "call_0", "type": "function", "function": {"name": add.__name__, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _wrong_pair(pair: Pair, rng: random.Random) -> Pair:
    """`pair` with one digit changed, and still a pair of the training side."""
    while True:
        a, b = (str(operand) for operand in pair)
        a, b = (_wrong_digit(a, rng), b) if rng.random() < 0.5 else (a, _wrong_digit(b, rng))
        wrong = (int(a), int(b))
        if min(wrong) >= ToolSum.operands.start and not is_heldout(wrong, one_in=ToolSum.one_in):
            return wrong


def _wrong_digit(number: str, rng: random.Random) -> str:
    position = rng.randrange(len(number))
    digit = rng.choice([digit for digit in "0123456789" if digit != number[position]])
    return number[:position] + digit + number[position + 1 :]
