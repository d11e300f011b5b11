"""Families that write ChatML: `<|im_start|>role` to `<|im_end|>`."""

from .base import CallFormat, Family, ImageFormat
from .calls import FUNCTION, HERMES, read_kimi

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

FAMILIES = (SMOLLM2, TINY, QWEN3, QWEN3_5, NEMOTRON_3, KIMI_K2)
