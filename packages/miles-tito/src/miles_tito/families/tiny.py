"""The tiny model of the quick start: ChatML with Hermes tool calls, no reasoning."""

from .base import Family

FAMILY = Family(name="tiny", close="<|im_end|>", tool_call=("<tool_call>", "</tool_call>"))
