"""Qwen3: ChatML, `<think>` reasoning, Hermes tool calls. Also its 2507 Instruct and Thinking models and Qwen3-Next."""

from .base import Family, ImageFormat
from .calls import HERMES

FAMILY = Family(
    name="qwen3",
    close="<|im_end|>",
    reasoning=("<think>", "</think>"),
    tool_call=HERMES,
    image=ImageFormat(placeholder="<|image_pad|>"),
)
