"""Proof for one tokenizer folder: template cases, played conversations, and random ones.

A conversation is played as a server would: the session encodes, a reply is "sampled", a client repeats the history
in its own spelling. It holds if every reply is found again, no message is lost, no text turns into a control token,
and the ids that a trajectory trains are exactly the ids sampled.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np

from .engine.generation import Generation, one_version
from .errors import MilesError
from .records import FinishReason, Message
from .sessions.session import Session
from .sessions.tree import Node
from .tokens.families import Family
from .tokens.family_choice import choose_family
from .tokens.merge import PROBE_TOOL, Joiner, Setting
from .tokens.messages import normalize
from .tokens.template_checks import Finding, called, check_template, lost_roles, said, takes_results
from .tokens.tokenizer import Tokenizer, load_tokenizer

_NOW = datetime(2026, 1, 2, 3, 4)
_WHITESPACE = {"plain": "{}", "edge whitespace": " \n\t{} \n\n"}
_WORDS = {
    "ascii": "next, please",
    "unicode": "é漢字👩‍👩‍👧\u200b\u202e\ufeff",
    "control text": "{controls}",
    "empty": "",
}
_SHOWN = 10
"""Broken cases that a table spells out."""
_ENDS = ("stopped", "truncated", "non-canonical")


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All findings for one tokenizer, as a table or JSON; `miles-tito verify` prints it."""

    tokenizer: str
    family: str
    findings: tuple[Finding, ...]
    seed: int

    @property
    def ok(self) -> bool:
        return not self.broken

    @property
    def broken(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.level == "error")

    def as_json(self) -> bytes:
        """All of it."""
        return msgspec.json.format(msgspec.json.encode({"ok": self.ok, **msgspec.to_builtins(self)}))

    def table(self) -> str:
        """How often each kind of case was tried and broke, then what broke and what a session works around."""
        tried, broke = Counter[str](), Counter[str]()
        for finding in self.findings:
            kinds = finding.case.split(", ") if finding.group == "played" else [finding.group]
            tried.update(kinds)
            broke.update(kinds if finding.level == "error" else [])
        rows = [("case", "tried", "broken"), *((kind, str(n), str(broke[kind])) for kind, n in tried.items())]
        width = max(len(row[0]) for row in rows)
        lines = [f"{self.tokenizer} as {self.family}, seed {self.seed}", ""]
        lines += [f"{kind:<{width}}  {n:>6}  {bad:>6}" for kind, n, bad in rows]
        shown = [*self.broken[:_SHOWN], *(finding for finding in self.findings if finding.level == "warning")]
        lines += ["", *(f"{finding.level}: {finding.case}: {finding.message}" for finding in shown)] if shown else []
        if len(self.broken) > _SHOWN:
            lines.append(f"… and {len(self.broken) - _SHOWN} more that broke; --json lists all.")
        verdict = "exact joins hold in every case" if self.ok else f"{len(self.broken)} cases break"
        return "\n".join([*lines, "", f"{verdict} ({len(self.findings)} tried)."])


def verify(
    tokenizer: Tokenizer | str | Path, *, family: Family | str = "auto", seed: int = 0, conversations: int = 200
) -> Report:
    """Try everything on one tokenizer.

    Args:
        tokenizer: one, or the folder of one.
        family: "auto" reads it off the template and proves it.
        seed: of the random conversations.
        conversations: how many random ones to play.

    Raises:
        TokenizerError: the folder cannot be read.
    """
    loaded = tokenizer if isinstance(tokenizer, Tokenizer) else load_tokenizer(tokenizer)
    try:
        chosen = choose_family(family, loaded)
        joiner = Joiner(loaded, chosen)
    except MilesError as error:
        finding = Finding(case="the family of this tokenizer", level="error", message=str(error))
        return Report(tokenizer=loaded.name, family=str(family), findings=(finding,), seed=seed)
    findings = [
        *check_template(joiner),
        *_matrix(joiner),
        *(_fuzz(joiner, seed + n) for n in range(conversations)),
    ]
    return Report(tokenizer=loaded.name, family=chosen.name, findings=tuple(findings), seed=seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """One request of a played conversation, and the reply to it."""

    users: list[Message]
    """What comes behind the reply before, where that called no tool."""
    result: str
    """What each call of the reply before returns."""
    reply: np.ndarray
    """[C] int32."""
    finish: FinishReason
    is_respelled: bool = True
    """Whether the client repeats the reply in its own spelling."""


def _played(joiner: Joiner, group: str, case: str, steps: Iterable[_Step], setting: Setting) -> Finding:
    try:
        problem = _problem(joiner, steps, setting)
    except MilesError as error:
        problem = str(error)
    return Finding(group=group, case=case, level="error" if problem else "ok", message=problem or "holds")


def _problem(joiner: Joiner, steps: Iterable[_Step], setting: Setting) -> str | None:
    """What is wrong with one conversation, None for nothing."""
    session = Session("verify", joiner, max_context=2**30, now=_NOW)
    messages: list[Message] = []
    sampled: list[np.ndarray] = []
    last: Node | None = None
    for number, step in enumerate(steps):
        calls = cast("list[dict[str, Any]]", messages[-1].get("tool_calls", []) if messages else [])
        appended = [{"role": "tool", "tool_call_id": call["id"], "content": step.result} for call in calls]
        appended = appended or step.users
        messages += appended
        plan = session.plan(normalize(messages), tools=setting.tools, variables=setting.variables)
        if plan.match.node is not last:
            return f"turn {number} repeats a reply that is not found again; the session would fork."
        ids = session.encode(plan)
        lost = lost_roles(joiner, appended, ids)
        if lost:
            return f"turn {number}: messages of role {', '.join(lost)} are not in the prompt."
        problem = _controls(joiner, plan.messages[plan.match.num_messages :], ids, setting, behind=last)
        if problem:
            return f"turn {number}: {problem}"
        turn = session.begin(plan, ids, rid=f"v{number}")
        turn.reader.feed(step.reply)
        turn.reader.finish()
        generation = Generation(
            output_ids=step.reply,
            logprobs=np.full(len(step.reply), -1.0, np.float32),
            versions=one_version(len(step.reply), number),
            finish_reason=step.finish,
        )
        last = session.commit(turn, generation)
        messages.append(_respelled(last.message) if step.is_respelled else last.message)
        sampled.append(step.reply)
    trajectories = session.trajectories()
    if len(trajectories) != 1:
        return f"the conversation became {len(trajectories)} trajectories."
    trained = trajectories[0].tokens[trajectories[0].loss_mask]
    return None if np.array_equal(trained, np.concatenate(sampled)) else "the ids trained are not the ids sampled."


def _controls(
    joiner: Joiner, messages: Sequence[Message], ids: np.ndarray, setting: Setting, *, behind: Node | None
) -> str | None:
    """Control tokens that the same prompt does not have when its messages hold none as text."""
    tokenizer = joiner.tokenizer
    if not any(tokenizer.has_control_text(message["content"]) for message in messages):
        return None
    bland = [{**m, "content": tokenizer.without_control_text(m["content"])} for m in messages]
    if behind is None:
        plain = joiner.start(bland, setting)
    else:
        plain = joiner.extend(bland, setting, last=int(behind.completion_ids[-1]), reply=behind.replay)
    controls = sorted(tokenizer.control_ids)
    extra = int(np.isin(ids, controls).sum()) - int(np.isin(plain, controls).sum())
    return f"{extra} control tokens come out of message text." if extra else None


def _matrix(joiner: Joiner) -> Iterator[Finding]:
    """Conversations over roles, turns, tools, thinking, whitespace, ends of replies and kinds of text."""
    tools = (False, True) if _has_tools(joiner) else (False,)
    thinking: list[dict[str, Any]] = [{}]
    if joiner.family.reasoning:
        thinking.append({"enable_thinking": False, "thinking": False})
    dimensions = itertools.product((False, True), (1, 3), tools, thinking, _WHITESPACE, _ENDS, _WORDS)
    for system, turns, with_tools, variables, space, end, words in dimensions:
        if turns == 1 and end != "stopped":
            continue  # how a reply ends matters to what comes behind it
        case = ", ".join(
            [
                f"{turns} turn{'s' * (turns > 1)}",
                *(["system"] if system else []),
                *(["tools"] if with_tools else []),
                *(["thinking off"] if variables else []),
                *(part for part in (space, end, words) if part not in ("plain", "stopped", "ascii")),
            ]
        )
        setting = Setting(tools=(PROBE_TOOL,) if with_tools else (), variables=variables, now=_NOW)
        steps = _steps(joiner, system=system, turns=turns, setting=setting, space=space, end=end, words=words)
        yield _played(joiner, "played", case, steps, setting)


def _steps(
    joiner: Joiner, *, system: bool, turns: int, setting: Setting, space: str, end: str, words: str
) -> Iterator[_Step]:
    text = _WHITESPACE[space].format(_WORDS[words].format(controls=joiner.tokenizer.some_control_text()))
    opening = [said("system", f"be short {text}")] if system else []
    for turn in range(turns):
        reply = called("ox", content="") if setting.tools and end != "truncated" else said("assistant", f"so: {text}")
        if joiner.family.reasoning and not setting.variables:
            reply["reasoning_content"] = "hm"
        ids = _reply_ids(joiner, reply, setting)
        finish = FinishReason.STOP
        if end == "truncated":
            ids, finish = ids[: max(1, len(ids) // 2)], FinishReason.LENGTH
        elif end == "non-canonical":
            ids = _non_canonical(joiner.tokenizer, ids, random.Random(turn))
        users = [*(opening if turn == 0 else []), said("user", text)]
        yield _Step(users=users, result=f"found {text}", reply=ids, finish=finish)


def _respelled(message: Message) -> Message:
    """As clients repeat a reply: arguments as compact JSON text, reasoning trimmed, content as parts."""
    calls = [
        {
            **call,
            "function": {**call["function"], "arguments": msgspec.json.encode(call["function"]["arguments"]).decode()},
        }
        for call in message.get("tool_calls", [])
    ]
    parts = [{"type": "text", "text": message["content"], "cache_control": {"type": "ephemeral"}}]
    reasoning = {"reasoning_content": f"\n{message['reasoning_content']} "} if "reasoning_content" in message else {}
    return {"role": "assistant", "content": parts, **reasoning, **({"tool_calls": calls} if calls else {})}


def _fuzz(joiner: Joiner, seed: int) -> Finding:
    """One random conversation; the seed says which."""
    rng = random.Random(seed)
    tools = _has_tools(joiner) and rng.random() < 0.5
    setting = Setting(tools=(PROBE_TOOL,) if tools else (), now=_NOW)
    steps = _random_steps(joiner, rng, setting)
    return _played(joiner, "random conversations", f"random conversation {seed}", steps, setting)


def _random_steps(joiner: Joiner, rng: random.Random, setting: Setting) -> Iterator[_Step]:
    for turn in range(rng.randint(1, 5)):
        users = [said("user", _random_text(joiner, rng)) for _ in range(rng.randint(1, 2))]
        if turn == 0 and rng.random() < 0.5:
            users.insert(0, said("system", _random_text(joiner, rng)))
        elif turn and rng.random() < 0.2 and joiner.family.late_system != "refuse":
            users.insert(rng.randint(0, len(users)), said("system", f"late {_random_text(joiner, rng)}"))
        finish = FinishReason.STOP
        if setting.tools and rng.random() < 0.5:
            words = [_random_text(joiner, rng) for _ in range(rng.randint(1, 2 if joiner.family.parallel_calls else 1))]
            ids = _reply_ids(joiner, called(*words), setting)
        else:
            ids = _random_ids(joiner, rng)
            if rng.random() < 0.3:
                finish = FinishReason.LENGTH
            else:
                ids = np.append(ids, np.int32(rng.choice(joiner.end_ids)))
        yield _Step(
            users=users,
            result=f"found {users[0]['content']}",
            reply=ids,
            finish=finish,
            is_respelled=rng.random() < 0.5,
        )


def _random_text(joiner: Joiner, rng: random.Random) -> str:
    control = joiner.tokenizer.some_control_text()
    pieces = ["word", " ", "\n", "\n\n", "é漢", "👩‍👩‍👧", "\u200b", "{", '"', "0", "\t", "</", control]
    return "".join(rng.choices(pieces, k=rng.randint(1, 6)))


def _random_ids(joiner: Joiner, rng: random.Random) -> np.ndarray:
    """[N] int32 ids that no end of a turn is among: hardly ever what encoding their text would give."""
    never = {*joiner.stop_ids, *joiner.end_ids}
    ids = [rng.randrange(joiner.tokenizer.vocab_size) for _ in range(rng.randint(1, 12))]
    return np.asarray([i for i in ids if i not in never and joiner.tokenizer.token_text(i)] or [0], np.int32)


def _reply_ids(joiner: Joiner, message: Message, setting: Setting) -> np.ndarray:
    """[N] int32 ids of a reply with its end token."""
    ids = joiner.encode_reply(message, setting)
    return ids if int(ids[-1]) in joiner.end_ids else np.append(ids, np.int32(joiner.end_ids[0]))


def _non_canonical(tokenizer: Tokenizer, ids: np.ndarray, rng: random.Random) -> np.ndarray:
    """The same text in other tokens: some are spelled out byte by byte."""
    pieces: list[np.ndarray] = []
    for token in ids.tolist():
        spelled = tokenizer.spelled_out(token) if rng.random() < 0.7 else None
        pieces.append(np.asarray([token], np.int32) if spelled is None else spelled)
    return np.concatenate(pieces)


def _has_tools(joiner: Joiner) -> bool:
    known = joiner.family.takes_tools and joiner.lists_tools and joiner.writes_tool_calls
    return known and takes_results(joiner)
