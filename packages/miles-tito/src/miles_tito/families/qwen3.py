"""Qwen3: ChatML, `<think>` reasoning, Hermes tool calls."""

from .base import Family

FAMILY = Family(
    name="qwen3",
    close="<|im_end|>",
    reasoning=("<think>", "</think>"),
    tool_call=("<tool_call>", "</tool_call>"),
)
