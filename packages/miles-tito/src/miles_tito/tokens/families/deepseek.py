"""DeepSeek V3 to V4. V3.2 and V4 ship no chat template; theirs are here.

V3, R1, V3.1   a block of calls between tokens of its own; system messages all go to the top
V3.2           calls in DSML, results inside `<function_results>`; for tools the folder needs a template that lists them
V4             calls in DSML, results inside a user turn; the text that introduces tools, or a reasoning effort, comes
               from DeepSeek's own package `deepseek-recipe`
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec

from miles_tito.errors import MissingDependency

from .base import CallFormat, Family
from .calls import read_deepseek, read_dsml

# Variables: `thinking`, or `enable_thinking` (default: true).
_CALLS = """
{%- macro calls_block(block, calls) -%}
    {{- '\n\n<｜DSML｜' ~ block ~ '>' -}}
    {%- for call in calls -%}
        {{- '\n<｜DSML｜invoke name="' ~ call.function.name ~ '">' -}}
        {%- for key, value in call.function.arguments.items() -%}
            {{- '\n<｜DSML｜parameter name="' ~ key ~ '" string="' ~ ('true' if value is string else 'false') ~ '">' -}}
            {{- (value if value is string else value | tojson) ~ '</｜DSML｜parameter>' -}}
        {%- endfor -%}
        {{- '\n</｜DSML｜invoke>' -}}
    {%- endfor -%}
    {{- '\n</｜DSML｜' ~ block ~ '>' -}}
{%- endmacro -%}
"""
V32_TEMPLATE = (
    _CALLS
    + """
{%- set thinks = thinking if thinking is defined else (enable_thinking if enable_thinking is defined else true) -%}
{%- set ns = namespace(last=-1) -%}
{%- for message in messages -%}
    {%- if message.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{{- bos_token -}}
{%- for message in messages -%}
    {%- set opening = '<think>' if thinks and loop.index0 >= ns.last else '</think>' -%}
    {%- if message.role == 'system' -%}
        {{- message.content -}}
    {%- elif message.role == 'user' -%}
        {{- '<｜User｜>' ~ message.content ~ '<｜Assistant｜>' ~ opening -}}
    {%- elif message.role == 'tool' -%}
        {%- if loop.first or loop.previtem.role != 'tool' -%}{{- '\n\n<function_results>' -}}{%- endif -%}
        {{- '\n<result>' ~ message.content ~ '</result>' -}}
        {%- if loop.last or loop.nextitem.role != 'tool' -%}
            {{- '\n</function_results>\n\n' ~ opening -}}
        {%- endif -%}
    {%- elif message.role == 'assistant' -%}
        {%- if thinks and loop.index0 > ns.last -%}{{- (message.reasoning_content or '') ~ '</think>' -}}{%- endif -%}
        {{- message.content -}}
        {%- if message.tool_calls -%}{{- calls_block('function_calls', message.tool_calls) -}}{%- endif -%}
        {{- eos_token -}}
    {%- else -%}
        {{- raise_exception('no such role: ' ~ message.role) -}}
    {%- endif -%}
{%- endfor -%}
"""
)
# Variables: `thinking`, or `enable_thinking` (default: true); `reasoning_effort` "low" (default), "high" or "max".
V4_TEMPLATE = (
    _CALLS
    + """
{%- set thinks = thinking if thinking is defined else (enable_thinking if enable_thinking is defined else true) -%}
{%- set ns = namespace(last=-1, open=false, system='') -%}
{%- for message in messages -%}
    {%- if message.role in ('user', 'tool') -%}{%- set ns.last = loop.index0 -%}{%- endif -%}
    {%- if message.role == 'system' -%}{%- set ns.system = ns.system ~ message.content -%}{%- endif -%}
{%- endfor -%}
{{- bos_token ~ effort_text ~ ns.system ~ tools_text -}}
{%- for message in messages -%}
    {%- if message.role in ('user', 'tool') -%}
        {{- '\n\n' if not loop.first and loop.previtem.role in ('user', 'tool') else '<｜User｜>' -}}
        {{- '<tool_result>' ~ message.content ~ '</tool_result>' if message.role == 'tool' else message.content -}}
        {%- if loop.last or loop.nextitem.role not in ('user', 'tool') -%}
            {%- set thought = thinks or (not loop.last and loop.nextitem.reasoning_content) -%}
            {%- set keeps = thinks if loop.index0 == ns.last else thought and tools -%}
            {{- '<｜Assistant｜>' ~ ('<think>' if keeps else '</think>') -}}
            {%- set ns.open = keeps -%}
        {%- endif -%}
    {%- elif message.role == 'assistant' -%}
        {%- if ns.open -%}{{- (message.reasoning_content or '') ~ '</think>' -}}{%- endif -%}
        {{- message.content -}}
        {%- if message.tool_calls -%}{{- calls_block('tool_calls', message.tool_calls) -}}{%- endif -%}
        {{- eos_token -}}
    {%- elif message.role != 'system' -%}
        {{- raise_exception('no such role: ' ~ message.role) -}}
    {%- endif -%}
{%- endfor -%}
"""
)


def texts(tools: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> Mapping[str, str]:
    """The template variables `tools_text` and `effort_text`."""
    thinks = variables.get("thinking", variables.get("enable_thinking", True))
    effort = str(variables.get("reasoning_effort", "low")) if thinks else "low"
    return {
        "tools_text": _between(msgspec.json.encode(tools), "low", thinks=bool(thinks)) if tools else "",
        "effort_text": _between(b"[]", effort, thinks=True) if effort != "low" else "",
    }


@functools.lru_cache(maxsize=64)
def _between(tools: bytes, effort: str, *, thinks: bool) -> str:
    """What DeepSeek's encoder writes in front of the first user turn; `tools` as JSON."""
    try:
        import deepseek_recipe
    except ImportError as error:
        raise MissingDependency(
            "DeepSeek V4 introduces tools and reasoning efforts with a text of its own: pip install "
            "'miles-tito[deepseek]', or put a chat_template.jinja into the model folder."
        ) from error
    recipe = cast("Any", deepseek_recipe)
    functions = [tool.get("function", tool) for tool in msgspec.json.decode(tools, type=list[dict[str, Any]])]
    conversation = recipe.Conversation(
        messages=[recipe.UserMessage("")],
        thinking_mode=thinks,
        tools=[recipe.ToolDefinition(f["name"], f.get("description"), f.get("parameters")) for f in functions],
        reasoning_effort=effort,
    )
    prompt: str = recipe.DeepseekV4Encoding().render_conversation(conversation).prompt
    return prompt.removeprefix("<｜begin▁of▁sentence｜>").partition("<｜User｜>")[0]


V3 = Family(
    name="deepseek-v3",
    aliases=("deepseek-r1", "deepseek-v3.1"),
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
V32 = Family(
    name="deepseek-v3.2",
    close="<｜end▁of▁sentence｜>",
    reasoning=("<think>", "</think>"),
    tool_call=CallFormat(
        open="<｜DSML｜function_calls>", close="</｜DSML｜function_calls>", inner=("｜DSML｜",), read=read_dsml
    ),
    late_system="fold",  # written in place it would have no mark of its own, and no turn would open behind it
    template=V32_TEMPLATE,
)
V4 = Family(
    name="deepseek-v4",
    close="<｜end▁of▁sentence｜>",
    reasoning=("<think>", "</think>"),
    tool_call=CallFormat(
        open="<｜DSML｜tool_calls>", close="</｜DSML｜tool_calls>", inner=("｜DSML｜",), read=read_dsml
    ),
    late_system="fold",  # its encoder moves them to the top, in front of what is stored
    template=V4_TEMPLATE,
    texts=texts,
)
FAMILIES = (V3, V32, V4)
