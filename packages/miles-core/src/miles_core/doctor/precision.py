"""What `[quant]` makes of the model, and whether it can."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from miles_tito.shared.settings import SettingError

from miles_core.config import Config
from miles_core.run.dry_run import quant_line

from .finding import Finding


def check(config: Config) -> Iterator[Finding]:
    """Nothing where the configuration has no `[quant]`."""
    if config.quant is None:
        return
    folder = Path(config.model.path).expanduser() if config.model.path else None
    try:
        message = quant_line(config.quant, folder if folder and (folder / "config.json").is_file() else None)
    except SettingError as error:
        fix = "change quant.only, quant.keep_bf16 or quant.format; `miles-quant convert` takes the same recipe"
        yield Finding(check="quant", level="fail", message=str(error), fix=fix)
    else:
        yield Finding(check="quant", level="ok", message=message.removeprefix("quant "))
