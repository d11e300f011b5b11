"""The model: its chat template, and what `[quant]` makes of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from miles_tito.errors import MilesError
from miles_tito.shared.settings import SettingError
from miles_tito.tokens.family_choice import choose_family, probe_template
from miles_tito.tokens.tokenizer import load_tokenizer

from miles_core.config import Config
from miles_core.run.dry_run import quant_line

from .results import CheckResult


def template(model: str | None, *, family: str) -> Iterator[CheckResult]:
    """Every case in which a conversation would have to be tokenized anew, which loses the sampled tokens."""
    if model is None:
        yield CheckResult("template", "ok", "no model folder is named; `--model DIR` checks one")
        return
    folder = Path(model).expanduser()
    try:
        tokenizer = load_tokenizer(folder)
        cases = probe_template(tokenizer, None if family == "auto" else choose_family(family, tokenizer))
    except (MilesError, OSError) as error:
        yield CheckResult("template", "fail", f"{folder}: {error}", "set model.path to a Hugging Face folder")
        return
    fix = (
        "set model.family to the model's family, or mend chat_template.jinja: a later turn must not change how earlier "
        "ones are written"
    )
    broken = [case for case in cases if case.level == "error"]
    yield from (CheckResult("template", "fail", f"not append-only: {c.case}: {c.message}", fix) for c in broken)
    yield from (CheckResult("template", "warn", f"{c.case}: {c.message}") for c in cases if c.level == "warning")
    if not broken:
        yield CheckResult("template", "ok", f"{folder.name} is append-only in {len(cases)} cases")


def quant(config: Config) -> Iterator[CheckResult]:
    """Whether the model can be held in the numbers of `[quant]`; nothing where there are none."""
    if config.quant is None:
        return
    folder = Path(config.model.path).expanduser() if config.model.path else None
    try:
        message = quant_line(config.quant, folder if folder and (folder / "config.json").is_file() else None)
    except SettingError as error:
        fix = "change quant.only, quant.keep_bf16 or quant.format; `miles-quant convert` takes the same recipe"
        yield CheckResult("quant", "fail", str(error), fix)
    else:
        yield CheckResult("quant", "ok", message.removeprefix("quant "))
