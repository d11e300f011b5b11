"""Qwen3.5 and Qwen3.6: ChatML, `<think>` reasoning that the prompt opens, tool calls as `<function=f>`."""

from .base import Family, ImageFormat
from .calls import FUNCTION

FAMILY = Family(
    name="qwen3.5",
    close="<|im_end|>",
    reasoning=("<think>", "</think>"),
    tool_call=FUNCTION,
    late_system="fold",  # its template raises
    image=ImageFormat(placeholder="<|image_pad|>"),
)
