"""Everything that a configuration names by import string, tried before anything starts."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from miles_rollout.advantages import load_advantage
from miles_rollout.filters import load_filter
from miles_rollout.policies import load_failure_policy, load_stale_policy
from miles_tito.records import Env
from miles_tito.shared.plugins import check_call, load
from miles_tito.shared.settings import SettingError
from miles_train import check_backend

from miles_core.evaluation.config import is_import_string

from .checks import Kind
from .keys import KeyPath
from .problems import ConfigError, Problem, own_message
from .schema import Config


def check_plugins(config: Config, kind: Kind | None = None, *, sources: Mapping[KeyPath, str] | None = None) -> None:
    """Import each, and check that it takes its arguments; nothing is called.

    `miles rl`, `sft` and `resume` do so before a run has a directory, `--dry-run` and `doctor` instead of one.

    Args:
        kind: which command will run; None checks what any of them would use.
        sources: who set each key, for the error.

    Raises:
        ConfigError: lists every one that cannot be used. An error raised by a module of the user's is passed on.
    """
    problems: list[Problem] = []
    for path, attempt in [*_of_trainers(config), *(_of_rollout(config) if kind != "sft" else ())]:
        try:
            attempt()
        except SettingError as error:
            source = next((sources[path[:end]] for end in (2, 3) if path[:end] in sources), "") if sources else ""
            problems.append(Problem(source, ".".join(path), own_message(error)))
    if problems:
        raise ConfigError(problems)


def _of_trainers(config: Config) -> Iterator[tuple[KeyPath, Callable[[], object]]]:
    model, sft = config.model, config.sft
    if model.builder is not None:
        yield ("model", "builder"), partial(_check, model.builder, 1, model.builder_args, what="model.builder")
    if sft.data is not None:
        yield ("sft", "data"), partial(_check, sft.data, 0, sft.data_args, what="sft.data")
    yield ("train", "backend"), partial(check_backend, config.train)
    yield ("train", "loss", "kind"), config.train.loss.function
    yield ("monitor", "custom"), config.monitor.load_plugins


def _of_rollout(config: Config) -> Iterator[tuple[KeyPath, Callable[[], object]]]:
    rollout, external = config.rollout, config.eval.external
    if config.env.target is not None:
        yield ("env", "target"), partial(_check_env, config.env.target, config.env.args)
    yield ("rollout", "advantage"), partial(load_advantage, rollout.advantage)
    yield ("rollout", "filter"), partial(load_filter, rollout.filter)
    yield ("rollout", "failure_policy"), partial(load_failure_policy, rollout.failure_policy)
    yield ("rollout", "put_policy"), partial(load_stale_policy, rollout.put_policy)
    yield ("rollout", "take_policy"), partial(load_stale_policy, rollout.take_policy)
    if external is not None and is_import_string(external):
        yield ("eval", "external"), partial(_check, external, 2, {}, what="eval.external")


def _check(target: str, positional: int, keywords: Mapping[str, Any], *, what: str) -> None:
    if not _is_shipped(target, keywords):
        check_call(load(target, what=what), positional, keywords, what=what, target=target)


def _check_env(target: str, args: Mapping[str, Any]) -> None:
    """A factory and its arguments, or an environment as it is."""
    found = load(target, what="env.target")
    if not isinstance(found, Env) or isinstance(found, type) or args:
        check_call(found, 0, args, what="env.target", target=target)


def _is_shipped(target: str, keywords: Mapping[str, Any]) -> bool:
    """Whether Miles has such a function, which takes these arguments, by its source: model builders import torch, which
    takes seconds and which the driver has no use for."""
    module, _, name = target.partition(":")
    if not module.startswith("miles_"):
        return False
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        return False
    if spec is None or spec.origin is None:
        return False
    for node in ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return keywords.keys() <= {argument.arg for argument in [*node.args.args, *node.args.kwonlyargs]}
    return False
