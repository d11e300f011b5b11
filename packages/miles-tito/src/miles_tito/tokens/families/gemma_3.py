"""Gemma 3: user and model by turns, the system message inside the first user turn, no tools. Text only."""

from .base import Family

FAMILY = Family(
    name="gemma-3",
    close="<end_of_turn>",
    late_system="fold",
    alternates=True,
)
