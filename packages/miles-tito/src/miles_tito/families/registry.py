"""Families by name, and `auto`: read off the template, and proved."""

from __future__ import annotations

from miles_tito.errors import TemplateError
from miles_tito.tokenizer import Tokenizer

from . import qwen3, smollm2, tiny
from .base import Family

FAMILIES: dict[str, Family] = {module.FAMILY.name: module.FAMILY for module in (qwen3, smollm2, tiny)}


def choose_family(family: Family | str, tokenizer: Tokenizer) -> Family:
    """The family called `family`; "auto" reads it off the template of `tokenizer`.

    Raises:
        TemplateError: no such family, or (auto) a case of the template that breaks exact joins.
    """
    from miles_tito.probe import detect_close, probe_template  # which itself imports this package

    if isinstance(family, Family):
        return family
    if family != "auto":
        if family not in FAMILIES:
            raise TemplateError(f"Unknown family {family!r}; known: auto, {', '.join(sorted(FAMILIES))}.")
        return FAMILIES[family]
    broken = [finding for finding in probe_template(tokenizer) if finding.level == "error"]
    if broken:
        raise TemplateError(
            f"`auto` cannot prove exact joins for {tokenizer.name}: {len(broken)} cases break, the first is "
            f"{broken[0].case!r}: {broken[0].message} Name the family of this model, or mend its template."
        )
    source = tokenizer.template.source if tokenizer.template else ""
    reasoning, tool_call = ("<think>", "</think>"), ("<tool_call>", "</tool_call>")
    return Family(
        name="auto",
        close=detect_close(tokenizer),
        reasoning=reasoning if all(mark in source for mark in reasoning) else None,
        # Hermes calls are JSON; other models put XML between the same marks.
        tool_call=tool_call if tool_call[0] in source and "<function=" not in source else None,
    )
