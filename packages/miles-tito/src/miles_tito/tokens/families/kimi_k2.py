"""Kimi K2, K2-Thinking, K2.5 and K2.6, text only: the model samples ids of calls, and tool results repeat them."""

from .base import CallFormat, Family
from .calls import read_kimi

FAMILY = Family(
    name="kimi-k2",
    close="<|im_end|>",
    reasoning=("<think>", "</think>"),
    tool_call=CallFormat(
        open="<|tool_calls_section_begin|>",
        close="<|tool_calls_section_end|>",
        inner=("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        read=read_kimi,
    ),
)
