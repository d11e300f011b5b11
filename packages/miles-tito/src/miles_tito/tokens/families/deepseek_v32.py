"""DeepSeek V3.2: calls in DSML, results inside `<function_results>`.

The model ships no chat template. This one does not list tools: for those the folder needs one that does.
"""

from .base import CallFormat, Family
from .calls import read_dsml

# Variables: `thinking`, or `enable_thinking` (default: true).
CALLS = """
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
TEMPLATE = (
    CALLS
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

FAMILY = Family(
    name="deepseek-v3.2",
    close="<｜end▁of▁sentence｜>",
    reasoning=("<think>", "</think>"),
    tool_call=CallFormat(
        open="<｜DSML｜function_calls>", close="</｜DSML｜function_calls>", inner=("｜DSML｜",), read=read_dsml
    ),
    late_system="fold",  # written in place it would have no mark of its own, and no turn would open behind it
    template=TEMPLATE,
)
