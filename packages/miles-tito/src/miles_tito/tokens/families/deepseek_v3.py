"""DeepSeek V3, R1 and V3.1: a block of calls between tokens of its own; system messages all go to the top."""

from .base import CallFormat, Family
from .calls import read_deepseek

FAMILY = Family(
    name="deepseek-v3",
    close="<｜end▁of▁sentence｜>",
    reasoning=("<think>", "</think>"),
    tool_call=CallFormat(
        open="<｜tool▁calls▁begin｜>",
        close="<｜tool▁calls▁end｜>",
        inner=("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
        read=read_deepseek,
    ),
    late_system="fold",  # its template moves them to the top, in front of what is stored
    string_arguments=True,
    habits=("after a tool turn",),  # only the first results of a conversation are opened
)
