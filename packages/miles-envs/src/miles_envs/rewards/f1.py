"""Reward: word overlap of answer and label, as in SQuAD (arXiv:1606.05250 §6.1)."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

from miles_tito.records import Message, Prompt

from .score import answer_of, labels_of

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def token_f1(prompt: Prompt, messages: Sequence[Message]) -> float:
    """F1 of the words of the last answer and of the label; the best of them for a list of labels."""
    answer = words(answer_of(prompt, messages))
    return max((f1(answer, words(str(label))) for label in labels_of(prompt)), default=0.0)


def words(text: str) -> list[str]:
    """Words in lower case without punctuation and articles."""
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def f1(answer: Sequence[str], label: Sequence[str]) -> float:
    """2PR / (P + R) over the multisets of words; 1 when both are empty."""
    if not answer or not label:
        return float(not answer and not label)
    shared = (Counter(answer) & Counter(label)).total()
    return 2 * shared / (len(answer) + len(label))
