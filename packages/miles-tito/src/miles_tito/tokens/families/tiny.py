"""The tiny model of the quick start: ChatML with Hermes tool calls, no reasoning."""

from .base import Family
from .calls import HERMES

FAMILY = Family(name="tiny", close="<|im_end|>", tool_call=HERMES)
