"""Families whose models ship a chat template. ChatML is `<|im_start|>role` to `<|im_end|>`."""

from .base import CallFormat, CallShape, Family, ImageFormat
from .calls import FUNCTION, HERMES, PAIRS, read_invoke, read_json_list, read_kimi, read_parameters

SMOLLM2 = Family(name="smollm2", aliases=("chatml",), close="<|im_end|>")
"""SmolLM2, and any plain ChatML model without reasoning; its template lists no tools."""

TINY = Family(name="tiny", close="<|im_end|>", tool_call=HERMES)
"""The tiny model of the quick start: Hermes tool calls, no reasoning."""

QWEN3 = Family(
    name="qwen3",
    aliases=("qwen3-thinking", "qwen3-next", "qwen3-vl"),
    close="<|im_end|>",
    reasoning=("<think>", "</think>"),
    tool_call=HERMES,
    image=ImageFormat(placeholder="<|image_pad|>"),
)
"""Qwen3: `<think>` reasoning, Hermes tool calls. Also its 2507 Instruct and Thinking models and Qwen3-Next."""

QWEN3_5 = Family(
    name="qwen3.5",
    aliases=("qwen3.6", "qwen3-coder"),
    close="<|im_end|>",
    reasoning=("<think>", "</think>"),
    tool_call=FUNCTION,
    late_system="fold",  # its template raises
    image=ImageFormat(placeholder="<|image_pad|>"),
)
"""Qwen3.5 and Qwen3.6: `<think>` reasoning that the prompt opens, tool calls as `<function=f>`."""

NEMOTRON_3 = Family(name="nemotron-3", close="<|im_end|>", reasoning=("<think>", "</think>"), tool_call=FUNCTION)
"""Nemotron 3: `<think>` reasoning that the prompt opens, tool calls as `<function=f>`."""

KIMI_K2 = Family(
    name="kimi-k2",
    aliases=("kimi-k2-thinking", "kimi-k2.5", "kimi-k2.6"),
    close="<|im_end|>",
    reasoning=("<think>", "</think>"),
    tool_call=CallFormat(
        open="<|tool_calls_section_begin|>",
        close="<|tool_calls_section_end|>",
        inner=("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        read=read_kimi,
    ),
)
"""Kimi K2, K2-Thinking, K2.5 and K2.6, text only: the model samples ids of calls, and tool results repeat them."""

GEMMA_3 = Family(
    name="gemma-3",
    close="<end_of_turn>",
    late_system="fold",
    alternates=True,
)
"""Gemma 3: user and model alternate, the system message inside the first user turn, no tools. Text only."""

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
"""Mistral: `[TOOL_CALLS]` runs to the end of the turn; user and assistant alternate; call ids of 9 characters."""

FAMILIES = (
    *(SMOLLM2, TINY, QWEN3, QWEN3_5, NEMOTRON_3, KIMI_K2),
    *(GEMMA_3, GLM, LLAMA_3_1, MINIMAX_M2, MISTRAL),
)
