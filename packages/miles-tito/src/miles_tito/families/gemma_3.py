"""Gemma 3: user and model by turns, the system message inside the first user turn, no tools."""

from .base import Family, ImageFormat

FAMILY = Family(
    name="gemma-3",
    close="<end_of_turn>",
    late_system="fold",
    alternates=True,
    image=ImageFormat(placeholder="<start_of_image>"),
)
