"""Reward: the answer equals the label as text."""

from __future__ import annotations

from collections.abc import Sequence

from miles_tito.records import Message, Prompt

from .score import answer_of, labels_of


def exact_match(prompt: Prompt, messages: Sequence[Message]) -> float:
    """1 if the last answer is the label, white space around both aside; a list of labels accepts any of them."""
    return float(answer_of(prompt, messages).strip() in {str(label).strip() for label in labels_of(prompt)})
