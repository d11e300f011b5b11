"""Where rendering a conversation again breaks the prefix that was sampled: one table for all families.

    .venv/bin/python benchmarks/tito_drift.py

Each cell samples one reply behind a short prompt, reads it as an engine's parser would, and renders the whole history
again with the model's own template, one message later. "B": the ids no longer begin with the prompt and the reply, so
that a trainer that renders again trains on other ids, or must split the conversation. A session never renders again;
`miles-tito verify` proves that its joins hold.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from miles_tito.errors import MilesError
from miles_tito.tokens.merge import Joiner, Setting
from miles_tito.tokens.reply_parser import TurnReader

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "packages" / "miles-tito" / "tests"))

from models_at_hand import MODELS, joiner_of

Message = dict[str, Any]
Vary = Callable[[str], str]

TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks a word up.",
        "parameters": {
            "type": "object",
            "properties": {
                "word": {"type": "string"},
                "exact": {"type": "boolean"},
                "ratio": {"type": "number"},
                "lines": {"type": "array", "items": {"type": "integer"}},
            },
        },
    },
}
USER: Message = {"role": "user", "content": "What is an ox?"}


def call(**arguments: Any) -> Message:
    function = {"name": "look_up", "arguments": arguments}
    calls = [{"id": "functions.look_up:0", "type": "function", "function": function}]
    return {"role": "assistant", "content": "", "reasoning_content": "Hmword", "tool_calls": calls}


ANSWER: Message = {"role": "assistant", "content": "Soword", "reasoning_content": "Hmword"}
PLAIN: Message = {"role": "assistant", "content": "Soword"}


def as_models_write(text: str) -> str:
    """Values as JSON, which models are trained to write; some templates print Python's."""
    return text.replace("False", "false").replace("[1, 2]", "[1,2]")


def without_spaces(text: str) -> str:
    return re.sub(r'": ?', '":', text)


CASES: dict[str, tuple[Message, Vary, str]] = {
    "tool turn": (call(word="ox"), str, "tool"),
    "JSON spacing": (call(word="ox", lines=[1, 2]), without_spaces, "tool"),
    "typed args": (call(exact=False, ratio=1.0), as_models_write, "tool"),
    "edge space, content": (ANSWER, lambda text: text.replace("Soword", " Soword \n"), "user"),
    "edge space, reasoning": (call(word="ox"), lambda text: text.replace("Hmword", "\n Hmword\n \n"), "tool"),
    "empty think": (PLAIN, str, "user"),
    "text after call": (call(word="ox"), lambda text: text, "tool"),
    "new user": (ANSWER, str, "user"),
}


def verdict(joiner: Joiner, case: str) -> str:
    """ok, B, or why the case does not apply."""
    message, vary, follows = CASES[case]
    tools = follows == "tool"
    if tools and not (joiner.lists_tools and joiner.writes_tool_calls):
        return "n/a"
    if not joiner.family.reasoning and not joiner.family.channels:
        if case in ("edge space, reasoning", "empty think"):
            return "n/a"
        message = {key: value for key, value in message.items() if key != "reasoning_content"}
    calls = joiner.family.tool_call
    if case == "text after call" and (calls is None or not calls.close):
        return "n/a"  # a call ends the turn
    setting = Setting(tools=(TOOL,) if tools else ())
    prompt = joiner.start([USER], setting)
    try:
        sampled = sample(joiner, message, vary, setting, text_after=case == "text after call")
        read = parse(joiner, sampled, prompt, setting)
        again = joiner.start([USER, read, following(read, follows)], setting)
    except MilesError as error:
        return f"fails ({str(error).split(': ')[-1][:40]})"
    if tools and not read.get("tool_calls"):
        return "unread"
    known = np.concatenate([prompt, sampled])
    return "ok" if np.array_equal(again[: len(known)], known) else "B"


def sample(joiner: Joiner, message: Message, vary: Vary, setting: Setting, *, text_after: bool) -> np.ndarray:
    """[N] int32 ids of a reply as the model would sample it: the template's text, varied, with its end token."""
    tokenizer = joiner.tokenizer
    ids = joiner.encode_reply(message, setting)
    end = ids[-1:] if int(ids[-1]) in joiner.end_ids else np.asarray(joiner.end_ids[:1], np.int32)
    body = ids[:-1] if int(ids[-1]) in joiner.end_ids else ids
    text = vary(tokenizer.decode(body, keep=tokenizer.control_ids)) + ("\nThat is all." if text_after else "")
    return np.concatenate([tokenizer.encode(text), end])


def parse(joiner: Joiner, sampled: np.ndarray, prompt: np.ndarray, setting: Setting) -> Message:
    opened = joiner.opens_reasoning(prompt)
    reader = TurnReader(joiner.tokenizer, joiner.family, tools=setting.tools, in_reasoning=opened)
    reader.feed(sampled)
    reader.finish()
    return reader.message("call")


def following(read: Message, role: str) -> Message:
    if role == "user":
        return {"role": "user", "content": "And a cow?"}
    call_id = next((c.get("native_id") or c["id"] for c in read.get("tool_calls", [])), "functions.look_up:0")
    return {"role": "tool", "tool_call_id": call_id, "content": "cattle"}


def late_system(joiner: Joiner) -> str:
    """What the bare template makes of a system message in mid-chat."""
    late = {"role": "system", "content": "qzLatezq"}
    conversation = [USER, {"role": "assistant", "content": "qzReplyzq"}, late, USER]
    try:
        text = joiner.tokenizer.render(conversation, generation_prompt=True)
    except MilesError:
        return "raises"
    if "qzLatezq" not in text:
        return "dropped"
    return "ok" if text.index("qzLatezq") > text.index("qzReplyzq") else "moved to the top"


def other_spelling(joiner: Joiner) -> str:
    """A reply sampled one character a token."""
    tokenizer = joiner.tokenizer
    spelled = np.concatenate([tokenizer.encode(character) for character in "Soword"])
    return "ok" if np.array_equal(tokenizer.encode(tokenizer.decode(spelled)), spelled) else "B"


def main() -> None:
    columns = [*CASES, "system in mid-chat", "other spelling"]
    print("| model | " + " | ".join(columns) + " |")
    print("|---" * (len(columns) + 1) + "|")
    for name, model in MODELS.items():
        try:
            joiner = joiner_of(name)
        except pytest.skip.Exception as reason:
            print(f"| {name} | left out: {reason} |")
            continue
        cells = [*(verdict(joiner, case) for case in CASES), late_system(joiner), other_spelling(joiner)]
        print(f"| {name}{'' if model.is_real else '*'} | " + " | ".join(cells) + " |")
    print("\n* a small BPE with the model's control tokens stands in for its tokenizer.")


if __name__ == "__main__":
    main()
