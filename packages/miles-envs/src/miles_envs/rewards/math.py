r"""Reward: the answer in the last `\boxed{}` is mathematically equal to the label.

The box is opened in one place only, so nothing can open it twice. Equivalence is decided by math-verify without its
own timeouts: those need SIGALRM, which threads do not have. The pool's process timeout bounds it instead.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence

from miles_tito.records import Message, Prompt

from miles_envs.optional import require

from .score import answer_of, label_of

_BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
"""Braces, and escaped characters to step over."""
_SINGLE = re.compile(r"\\[a-zA-Z]+|[^\s{}\\]")


def math_equal(prompt: Prompt, messages: Sequence[Message]) -> float:
    """1 if what the last answer boxes equals the label, which may itself be boxed; without a whole box 0."""
    label = str(label_of(prompt))
    answer = extract_boxed(answer_of(prompt, messages))
    if answer is None:
        return 0.0
    boxed_label = extract_boxed(label)
    return float(is_equivalent(answer, label if boxed_label is None else boxed_label))


def extract_boxed(text: str) -> str | None:
    r"""Content of the last `\boxed{…}` or `\fbox{…}`; None without one, or when the last one is never closed.

    `\boxed 5` and `\boxed\pi` take the one token that TeX would take.
    """
    boxes = list(_BOX.finditer(text))
    if not boxes:
        return None
    start = boxes[-1].end()
    if not text.startswith("{", start):
        single = _SINGLE.match(text, start)
        return single[0] if single else None
    depth = 0
    for brace in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0 and brace[0] == "}":
            return text[start + 1 : brace.start()].strip()
    return None


def is_equivalent(answer: str, label: str) -> bool:
    """Whether two pieces of LaTeX mean the same: equal text, else equal by math-verify.

    Raises:
        MissingDependency: the texts differ and math-verify is not installed.
    """
    if _plain(answer) == _plain(label):
        return True
    math_verify = require("math_verify", extra="math")
    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.ERROR)  # they warn that their timeouts are off
    reading = [math_verify.LatexExtractionConfig(), math_verify.ExprExtractionConfig()]
    gold, found = (math_verify.parse(f"${text}$", reading, parsing_timeout=None) for text in (label, answer))
    return bool(gold and found) and bool(math_verify.verify(gold, found, timeout_seconds=None))


def _plain(latex: str) -> str:
    return re.sub(r"\s+|\\[,;! ]|\\left|\\right|(?<=\d),(?=\d{3})", "", latex).strip("$").rstrip(".")
