"""Families whose turn is messages on channels, read by `families.channels`.

gpt-oss   harmony: a reply ends with `<|return|>`, a call with `<|call|>`; a message in between with `<|end|>`
Inkling   the model samples its own header; it ships no chat template, and this is one
"""

from .base import Family

# Variables: `reasoning_effort`, a number (default: 0.9, as its own renderer's).
_INKLING_TEMPLATE = """
{%- macro block(role, kind, body, name='') -%}
    {{- '<|message_' ~ role ~ '|>' ~ name ~ '<|content_' ~ kind ~ '|>' ~ body ~ '<|end_message|>' -}}
{%- endmacro -%}
{%- set ns = namespace(leading=true, name='', tools=[]) -%}
{%- for tool in tools or [] -%}{%- set ns.tools = ns.tools + [dict(tool.function, type='function')] -%}{%- endfor -%}
{%- for message in messages -%}
    {%- if ns.leading and message.role != 'system' -%}
        {%- set ns.leading = false -%}
        {%- if tools -%}
            {{- block('system', 'xml', ns.tools | tojson(separators=(',', ':'), sort_keys=true), 'tool_declare') -}}
        {%- endif -%}
        {{- block('system', 'text', 'Thinking effort level: ' ~ (reasoning_effort or 0.9)) -}}
    {%- endif -%}
    {%- if message.role == 'assistant' -%}
        {%- if message.reasoning_content -%}{{- block('model', 'thinking', message.reasoning_content) -}}{%- endif -%}
        {%- if message.content -%}{{- block('model', 'text', message.content) -}}{%- endif -%}
        {%- for call in message.tool_calls or [] -%}
            {%- set arguments = call.function.arguments | tojson(separators=(',', ':'), sort_keys=true) -%}
            {%- set body = '{"name":' ~ (call.function.name | tojson) ~ ',"args":' ~ arguments ~ '}' -%}
            {{- block('model', 'invoke_tool_json', body, call.function.name) -}}
        {%- endfor -%}
        {{- '<|content_model_end_sampling|>' -}}
    {%- elif message.role == 'tool' -%}
        {%- set ns.name = message.name or '' -%}
        {%- for earlier in messages[:loop.index0] -%}
            {%- for call in earlier.tool_calls or [] if call.id == message.tool_call_id -%}
                {%- set ns.name = call.function.name -%}
            {%- endfor -%}
        {%- endfor -%}
        {{- block('tool', 'text', message.content, ns.name) -}}
    {%- else -%}
        {{- block(message.role, 'text', message.content) -}}
    {%- endif -%}
{%- endfor -%}
"""

GPT_OSS = Family(
    name="gpt-oss",
    close="<|end|>",
    stops=("<|return|>", "<|call|>"),
    channels="harmony",
    late_system="fold",  # its template drops them
    reasoning_field="thinking",
)
INKLING = Family(
    name="inkling",
    close="<|end_message|>",
    stops=("<|content_model_end_sampling|>",),
    channels="inkling",
    template=_INKLING_TEMPLATE,
)
FAMILIES = (GPT_OSS, INKLING)
