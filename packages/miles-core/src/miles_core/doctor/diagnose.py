"""Runs every check; one that cannot finish is a finding itself and hides no other."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from miles_core.config import Config, ConfigError, load_config
from miles_core.config.plugins import check_plugins
from miles_core.run.dry_run import model_folder

from . import checks
from .results import CheckResult


def diagnose(words: Sequence[str] = (), *, model: str | None = None) -> list[CheckResult]:
    """Every finding about this machine and the configuration that `words` name (see `load_config`).

    Args:
        model: a model folder whose chat template is checked, besides the configuration's own.
    """
    config, findings = _configuration(words)
    folder = model_folder(config) if model is None else Path(model).expanduser()
    by_name: dict[str, Callable[[], Iterable[CheckResult]]] = {
        "python": lambda: checks.python(),
        "torch": lambda: checks.torch(config),
        "sglang": lambda: checks.sglang(config),
        "router": lambda: checks.router(config),
        "ray": lambda: checks.ray(),
        "packages": lambda: checks.requirements(),
        "template": lambda: checks.template(folder, family=config.model.family),
        "quant": lambda: checks.quant(config),
        "shared memory": lambda: checks.shared_memory(config),
        "disk": lambda: checks.disk(config),
        "memory": lambda: checks.memory(config),
        "ports": lambda: checks.ports(config),
        "open files": lambda: checks.open_files(config),
    }
    for name, check in by_name.items():
        try:
            findings += check()
        except Exception as error:  # the boundary: a broken machine breaks checks in any way it likes
            findings.append(CheckResult(name, "fail", f"the check itself failed: {type(error).__name__}: {error}"))
    return findings


def _configuration(words: Sequence[str]) -> tuple[Config, list[CheckResult]]:
    """The configuration to check against, the default one where it does not resolve."""
    config = Config()
    try:
        loaded = load_config(words)
        config = loaded.config
        sys.path[:0] = loaded.import_paths
        check_plugins(config, sources=loaded.sources)
    except ConfigError as error:
        fix = "correct it; `miles config --docs` has all keys"
        return config, [CheckResult("config", "fail", str(p), fix) for p in error.problems]
    what = ", ".join(str(file) for file in loaded.files) or "the default configuration"
    return config, [CheckResult("config", "ok", f"{what} resolved")]
