"""Import the model that is served, and not the two hundred others: 4 s of every start."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

DISABLED = "SGLANG_DISABLED_MODEL_ARCHS"


def import_only_served_model(options: Sequence[str]) -> None:
    """Tell SGLang's registry, through its own variable, to pass over model files that do not define the served model.

    Whatever cannot be told from the command line leaves the registry as it is: a model from the hub, a speculative
    draft model, an unknown architecture, a list that the user has set.
    """
    if DISABLED in os.environ or any(option.startswith("--speculative") for option in options):
        return
    architectures = _architectures(_model_path(options))
    spec = importlib.util.find_spec("sglang")
    if not architectures or spec is None or not spec.submodule_search_locations:
        return
    files = sorted(Path(spec.submodule_search_locations[0], "srt", "models").glob("*.py"))
    needed = {file.stem for file in files if defines_one_of(file.read_text(encoding="utf-8"), architectures)}
    if needed:
        os.environ[DISABLED] = ",".join(file.stem for file in files if file.stem not in needed)


def defines_one_of(source: str, names: Sequence[str]) -> bool:
    """Whether a module's source defines a class of one of these names."""
    return any(re.search(rf"^class {re.escape(name)}\b", source, re.MULTILINE) for name in names)


def _model_path(options: Sequence[str]) -> Path | None:
    for index, option in enumerate(options):
        flag, equals, value = option.partition("=")
        if flag in ("--model-path", "--model"):
            return Path(value) if equals else Path(options[index + 1]) if index + 1 < len(options) else None
    return None


def _architectures(model: Path | None) -> tuple[str, ...]:
    """The `architectures` of a local model folder."""
    config = model / "config.json" if model else None
    if config is None or not config.is_file():
        return ()
    parsed: Any = json.loads(config.read_text(encoding="utf-8"))
    return tuple(cast(dict[str, list[str]], parsed).get("architectures") or ())
