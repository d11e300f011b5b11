"""Mistral: `[TOOL_CALLS]` runs to the end of the turn; user and assistant by turns; call ids of 9 characters."""

from .base import CallFormat, Family
from .calls import read_json_list

FAMILY = Family(
    name="mistral",
    close="</s>",
    reasoning=("[THINK]", "[/THINK]"),
    tool_call=CallFormat(open="[TOOL_CALLS]", close="", inner=("[ARGS]", "[CALL_ID]"), read=read_json_list),
    late_system="fold",
    alternates=True,
    short_ids=True,
)
