"""The family of a tokenizer: by name, or read off its chat template and proved."""

from __future__ import annotations

from dataclasses import replace

from miles_tito.errors import MilesError, TemplateError

from .families import ALIASES, FAMILIES
from .families.base import Family, LateSystem
from .families.calls import FUNCTION, HERMES
from .merge import Joiner
from .template_checks import Finding, check_late_system, check_template, said
from .tokenizer import Tokenizer

_REPLY = "qzProbeReplyzq"
_TELLTALES = {
    "<|channel|>": "gpt-oss",
    "<|tool_calls_section_begin|>": "kimi-k2",
    "<minimax:tool_call>": "minimax-m2",
    "<｜tool▁calls▁begin｜>": "deepseek-v3",
    "<arg_key>": "glm",
    "[INST]": "mistral",
    "<start_of_turn>": "gemma-3",
    "<|start_header_id|>": "llama-3.1",
}
"""Text in a template that only one family writes."""


def choose_family(family: Family | str, tokenizer: Tokenizer) -> Family:
    """The family called `family`; "auto" reads it off the template of `tokenizer`.

    Raises:
        TemplateError: no such family, or (auto) a case of the template that breaks exact joins.
    """
    if isinstance(family, Family):
        return family
    if family == "auto":
        return detect_family(tokenizer)
    name = ALIASES.get(family, family)
    if name not in FAMILIES:
        known = ", ".join(["auto", *sorted({*FAMILIES, *ALIASES})])
        raise TemplateError(f"Unknown family {family!r}; known: {known}.")
    return FAMILIES[name]


def probe_template(tokenizer: Tokenizer, family: Family | None = None) -> list[Finding]:
    """One finding a case. Without `family`, it is read off the template.

    An error means that a session cannot guarantee exact joins. A warning is a habit of the template that a session
    works around or that loses something the user may expect.
    """
    try:
        joiner = Joiner(tokenizer, family or guess_family(tokenizer))
    except MilesError as error:
        return [Finding(case="the end of an assistant turn", level="error", message=str(error))]
    return check_template(joiner)


def detect_family(tokenizer: Tokenizer) -> Family:
    """The family that the template of `tokenizer` is written like, proved to join exactly.

    Raises:
        TemplateError: a case breaks; it is named.
    """
    broken = [finding for finding in probe_template(tokenizer) if finding.level == "error"]
    if broken:
        raise TemplateError(
            f"`auto` cannot prove exact joins for {tokenizer.name}: {len(broken)} cases break, the first is "
            f"{broken[0].case!r}: {broken[0].message} Name the family of this model, or mend its template."
        )
    return guess_family(tokenizer)


def guess_family(tokenizer: Tokenizer) -> Family:
    """What the template says of its family, unproved.

    Raises:
        MilesError: the template ends a turn with no token of its own.
    """
    source = tokenizer.template.source if tokenizer.template else ""
    for text, name in _TELLTALES.items():
        if text in source:
            return replace(FAMILIES[name], name="auto", template=None)
    reasoning = ("<think>", "</think>")
    calls = (FUNCTION if "<function=" in source else HERMES) if "<tool_call>" in source else None
    close = detect_close(tokenizer)
    return Family(
        name="auto",
        close=close,
        reasoning=reasoning if all(mark in source for mark in reasoning) else None,
        tool_call=calls,
        late_system=_late_system(tokenizer, close),
    )


def detect_close(tokenizer: Tokenizer) -> str:
    """The added token that the template writes right after an assistant's text.

    Raises:
        TemplateError: the template cannot be rendered.
        MilesError: it writes no such token.
    """
    text = tokenizer.render([said("user", "q"), said("assistant", _REPLY), said("user", "q")])
    after = text.partition(_REPLY)[2]
    for size in range(1, min(len(after), 64)):
        if tokenizer.is_added(after[:size]):
            return after[:size]
    raise MilesError(
        f"The chat template of {tokenizer.name} ends an assistant turn with {after[:24]!r}, which begins with no token "
        "of its own; a session could not tell where a turn ends."
    )


def _late_system(tokenizer: Tokenizer, close: str) -> LateSystem:
    """Whether the template writes a system message in mid-chat in its place."""
    probe = Joiner(tokenizer, Family(name="auto", close=close))
    try:
        return "keep" if check_late_system(probe) is None else "fold"
    except MilesError:
        return "fold"
