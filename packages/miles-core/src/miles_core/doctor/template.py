"""Whether a model's chat template lets sessions join turns token by token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from miles_tito.errors import MilesError
from miles_tito.tokens.family_choice import choose_family, probe_template
from miles_tito.tokens.tokenizer import load_tokenizer

from .finding import Finding


def check(model: str | None, *, family: str) -> Iterator[Finding]:
    """Every case in which a conversation would have to be tokenized anew, which loses the sampled tokens."""
    if model is None:
        yield Finding(check="template", level="ok", message="no model folder is named; `--model DIR` checks one")
        return
    folder = Path(model).expanduser()
    try:
        tokenizer = load_tokenizer(folder)
        findings = probe_template(tokenizer, None if family == "auto" else choose_family(family, tokenizer))
    except (MilesError, OSError) as error:
        yield Finding(
            check="template", level="fail", message=f"{folder}: {error}", fix="set model.path to a Hugging Face folder"
        )
        return
    broken = [finding for finding in findings if finding.level == "error"]
    for finding in broken:
        yield Finding(
            check="template",
            level="fail",
            message=f"not append-only: {finding.case}: {finding.message}",
            fix="set model.family to the model's family, or mend chat_template.jinja: a later turn must not change how "
            "earlier ones are written",
        )
    for finding in findings:
        if finding.level == "warning":
            yield Finding(check="template", level="warn", message=f"{finding.case}: {finding.message}")
    if not broken:
        yield Finding(check="template", level="ok", message=f"{folder.name} is append-only in {len(findings)} cases")
