"""Chat templates in the dialect that Hugging Face tokenizers ship, rendered in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from miles_tito.errors import TemplateError
from miles_tito.records import Message


class ChatTemplate:
    """Messages to text, as `apply_chat_template` of Transformers would write it."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        """`sources` holds at least "default"; "tool_use" serves conversations with tools where there is one."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationTag]
        )
        # jinja leaves the types of these two tables open.
        environment.filters["tojson"] = _to_json  # pyright: ignore[reportUnknownMemberType]
        environment.globals["raise_exception"] = _raise_exception  # pyright: ignore[reportUnknownMemberType]
        self._special_tokens = dict(special_tokens)
        try:
            self._templates = {name: environment.from_string(source) for name, source in sources.items()}
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(f"The chat template does not parse: {error} (line {error.lineno}).") from error
        self.source = sources["default"]

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        generation_prompt: bool = False,
        now: datetime | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of `messages`.

        Args:
            now: what `strftime_now` answers from; a session freezes it so that its date never changes mid-way.
            variables: extra template variables, such as `enable_thinking`.

        Raises:
            TemplateError: the template refuses these messages or fails on them.
        """
        moment = now or datetime.now().astimezone()
        strftime: Callable[[str], str] = moment.strftime
        template = self._templates.get("tool_use" if tools else "default", self._templates["default"])
        try:
            return template.render(
                {
                    **self._special_tokens,
                    **(variables or {}),
                    "messages": list(messages),
                    "tools": list(tools) if tools else None,
                    "documents": None,
                    "add_generation_prompt": generation_prompt,
                    "strftime_now": strftime,
                }
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise TemplateError(f"The chat template fails on roles [{roles}]: {error}.") from error


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML characters, which models have never seen.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}`: templates for training mark assistant text with it; rendered as it is."""

    tags = {"generation"}  # noqa: RUF012  (jinja declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
