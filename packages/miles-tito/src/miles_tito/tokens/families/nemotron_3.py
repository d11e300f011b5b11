"""Nemotron 3: ChatML, `<think>` reasoning that the prompt opens, tool calls as `<function=f>`."""

from .base import Family
from .calls import FUNCTION

FAMILY = Family(name="nemotron-3", close="<|im_end|>", reasoning=("<think>", "</think>"), tool_call=FUNCTION)
