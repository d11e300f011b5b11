"""Llama 3.1 to 3.3: a reply that begins with `{` is one tool call; `<|eom_id|>` ends one that waits for its result."""

from .base import CallFormat, CallShape, Family
from .calls import read_parameters

FAMILY = Family(
    name="llama-3.1",
    close="<|eot_id|>",
    stops=("<|eot_id|>", "<|eom_id|>"),
    parallel_calls=False,
    tool_call=CallFormat(
        open="<|python_tag|>",
        close="",
        read=read_parameters,
        bare=True,
        shape=CallShape(begin='{"name": "NAME", "parameters": ', end="}"),
    ),
)
