"""MiniMax-M2, M2.5 and M2.7: reasoning that the prompt opens, calls as `<invoke name="f">`."""

from .base import CallFormat, CallShape, Family
from .calls import read_invoke

FAMILY = Family(
    name="minimax-m2",
    close="[e~[",
    reasoning=("<think>", "</think>"),
    tool_call=CallFormat(
        open="<minimax:tool_call>",
        close="</minimax:tool_call>",
        read=read_invoke,
        shape=CallShape(
            before="<minimax:tool_call>\n",
            begin='<invoke name="NAME">\n',
            end="\n</invoke>",
            after="\n</minimax:tool_call>",
            style="minimax_xml",
        ),
    ),
    late_system="fold",  # its template drops them
)
