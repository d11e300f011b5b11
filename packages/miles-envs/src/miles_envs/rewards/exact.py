"""The answer is the label, or it is not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from miles_tito.records import Message, Prompt

from .score import answer_of, label_of


def exact_match(prompt: Prompt, messages: Sequence[Message]) -> float:
    """1 if the last answer is the label, white space around both aside; a list of labels accepts any of them."""
    label = label_of(prompt)
    labels = cast("list[Any]", label) if isinstance(label, list) else [label]
    return float(answer_of(prompt, messages).strip() in {str(one).strip() for one in labels})
