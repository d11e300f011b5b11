"""Families with a form of their own."""

from .base import CallFormat, CallShape, Family
from .calls import PAIRS, read_invoke, read_json_list, read_parameters

GEMMA_3 = Family(
    name="gemma-3",
    close="<end_of_turn>",
    late_system="fold",
    alternates=True,
)
"""Gemma 3: user and model by turns, the system message inside the first user turn, no tools. Text only."""

GLM = Family(
    name="glm",
    aliases=("glm-4.5", "glm-4.6", "glm-4.7", "glm-5"),
    close="",
    stops=("<|user|>", "<|observation|>", "<|endoftext|>"),
    openers=("<|user|>", "<|observation|>", "<|assistant|>", "<|system|>"),
    reasoning=("<think>", "</think>"),
    tool_call=PAIRS,
)
"""GLM-4.5 to GLM-5: a turn ends with the token that opens the next message, which the model samples itself."""

LLAMA_3_1 = Family(
    name="llama-3.1",
    aliases=("llama-3.2", "llama-3.3"),
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
"""Llama 3.1 to 3.3: a reply that begins with `{` is one tool call; `<|eom_id|>` ends one that waits for its result."""

MINIMAX_M2 = Family(
    name="minimax-m2",
    aliases=("minimax-m2.5", "minimax-m2.7"),
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
"""MiniMax-M2, M2.5 and M2.7: reasoning that the prompt opens, calls as `<invoke name="f">`."""

MISTRAL = Family(
    name="mistral",
    close="</s>",
    reasoning=("[THINK]", "[/THINK]"),
    tool_call=CallFormat(open="[TOOL_CALLS]", close="", inner=("[ARGS]", "[CALL_ID]"), read=read_json_list),
    late_system="fold",
    alternates=True,
    short_ids=True,
)
"""Mistral: `[TOOL_CALLS]` runs to the end of the turn; user and assistant by turns; call ids of 9 characters."""

FAMILIES = (GEMMA_3, GLM, LLAMA_3_1, MINIMAX_M2, MISTRAL)
