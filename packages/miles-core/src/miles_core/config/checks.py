"""What no single section can check: that the sections fit together, and fit this machine."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Collection, Iterator
from typing import Literal

from miles_quant import QuantError, quantization_config
from miles_rollout.engines import resolve_device
from miles_tito.records import Sampling
from miles_train import PolicyLoss

from .keys import KeyPath
from .schema import Config

Kind = Literal["rl", "sft"]


_OF_ROLLOUT = ("rollout", "engines", "sync", "sessions", "workers", "eval", "env")
_OF_RL = (("run", "steps"), ("train", "loss"), ("train", "optimizer"), ("train", "schedule"), ("train", "minibatches"))

_OF_STARTED_ENGINES = (("count",), ("dtype",), ("context_length",), ("max_total_tokens",), ("threads",))


def check(config: Config, kind: Kind | None, given: Collection[KeyPath]) -> Iterator[tuple[KeyPath, str]]:
    """Each contradiction: the key to change, and why. `given` are the keys that somebody set."""
    yield from _lengths(config)
    yield from _trackers(config)
    if kind is not None:
        if config.model.path is None and config.model.builder is None:
            yield (
                ("model", "path"),
                "is not set. Set it to a Hugging Face folder, or model.builder to an import string.",
            )
        yield from _rl(config) if kind == "rl" else _sft(config)
    if config.sft.steps and config.sft.data is None:
        yield ("sft", "data"), f"is not set but sft.steps is {config.sft.steps}. Set it to `module:function`."
    if ("eval", "overlap") in given and config.eval.overlap != "backpressure" and config.eval.mode == "shared":
        yield (
            ("eval", "overlap"),
            f'is "{config.eval.overlap}" but eval.mode is "shared": training waits for each evaluation, so nothing '
            "overlaps. Remove it, or choose another mode.",
        )


def unread(config: Config, kind: Kind | None, given: Collection[KeyPath]) -> Iterator[tuple[KeyPath, KeyPath, str]]:
    """The keys of `given` that this command does not read: the key, the table that is meant, and why."""
    running = [(name,) for name, engine in config.engines.items() if engine.urls]
    for path in sorted(given):
        if kind == "sft" and path[0] in _OF_ROLLOUT:
            yield path, path[:1], "`miles sft` starts no engines and runs no environments"
        elif kind == "sft" and path[:2] in _OF_RL:
            yield path, path[:2], "`miles sft` has its own loss, and sft.steps, sft.optimizer and sft.schedule"
        elif kind == "rl" and not config.sft.steps and path[0] == "sft" and path[1:] not in ((), ("steps",)):
            yield path, path[:2], "sft.steps is 0"
        elif path[0] == "engines" and path[1:2] in running and path[2:] in _OF_STARTED_ENGINES:
            yield path, path, "the servers of `urls` run already"


def warnings(config: Config, kind: Kind | None) -> Iterator[str]:
    """What is allowed but is likely not meant."""
    cpus = os.cpu_count() or 1
    if config.train.device == "cpu" and config.train.ranks > cpus:
        yield f"train.ranks is {config.train.ranks} on a machine with {cpus} CPUs: ranks will take turns."
    if kind == "sft":
        return
    if not config.checkpoint.every and not config.checkpoint.at_end:
        yield "checkpoint.every is 0 and checkpoint.at_end is off: a run that dies starts over if nobody saves by hand."
    loss = config.train.loss
    if config.train.minibatches > 1 and isinstance(loss, PolicyLoss) and loss.clip_high >= 1:
        yield "train.minibatches is above 1 but clipping is so wide that later steps are hardly bounded."
    if kind == "rl" and not config.eval.enabled:
        yield "eval is off: nothing will tell learning from overfitting."


def _lengths(config: Config) -> Iterator[tuple[KeyPath, str]]:
    context = config.model.max_context
    if context is None:
        return
    samplings: dict[KeyPath, Sampling | None] = {("rollout",): config.rollout.sampling, ("eval",): config.eval.sampling}
    samplings |= {("eval", "datasets", name): dataset.sampling for name, dataset in config.eval.datasets.items()}
    for section, sampling in samplings.items():
        if sampling is not None and sampling.max_tokens >= context:
            yield (
                (*section, "sampling", "max_tokens"),
                f"is {sampling.max_tokens} but model.max_context is {context}: no token is left for the prompt.",
            )
    if config.train.token_budget < context:
        yield (
            ("train", "token_budget"),
            f"is {config.train.token_budget} but model.max_context is {context}: a full conversation must fit into one "
            "micro-batch. Raise the budget or lower the context.",
        )


def _trackers(config: Config) -> Iterator[tuple[KeyPath, str]]:
    wanted = {
        "tensorboard": config.monitor.tensorboard,
        "prometheus": config.monitor.prometheus.enabled,
        "wandb": config.monitor.wandb.enabled,
        "trackio": config.monitor.trackio.enabled,
    }
    modules = {"prometheus": "prometheus_client"}
    for name, is_on in wanted.items():
        if is_on and importlib.util.find_spec(modules.get(name, name)) is None:
            yield ("monitor", name), f"is on but {name} is not installed: pip install 'miles-core[{name}]'."


def _rl(config: Config) -> Iterator[tuple[KeyPath, str]]:
    if config.env.target is None:
        yield ("env", "target"), "is not set. Set it to `module:function` that returns an environment."
    yield from _engines(config)
    yield from _eval_engines(config)
    yield from _low_precision(config)
    if config.sync.way == "store":
        yield (
            ("sync", "way"),
            'is "store", but no engine of a run has a follower beside it that would fetch the weights, so every push '
            'would time out. Use "tensor", "disk" or "staged".',
        )
    if config.train.loss.kind == "sft":
        yield ("train", "loss", "kind"), 'is "sft", which ignores rewards. Use "policy", or `miles sft`.'
    if config.rollout.sampling.temperature == 0:
        yield (
            ("rollout", "sampling", "temperature"),
            f"is 0: the {config.rollout.group_size} siblings of a group would be alike and teach nothing. Use 1.0.",
        )
    episodes = config.rollout.groups_per_step * config.rollout.group_size
    if config.train.minibatches > episodes:
        yield (
            ("train", "minibatches"),
            f"is {config.train.minibatches} but a batch has {episodes} episodes "
            f"({config.rollout.groups_per_step} groups of {config.rollout.group_size}).",
        )
    if config.train.ranks > episodes:
        yield ("train", "ranks"), f"is {config.train.ranks} but a batch has only {episodes} episodes."


def _engines(config: Config) -> Iterator[tuple[KeyPath, str]]:
    rollout = [name for name, engine in config.engines.items() if engine.role == "rollout"]
    if not rollout:
        yield ("engines",), 'has no table with role = "rollout"; nothing would generate.'
    for name in rollout[1:]:
        yield (
            ("engines", name),
            f'is a second table with role = "rollout" beside engines.{rollout[0]}; `miles rl` starts one. '
            "Raise its `count` for more engines.",
        )
    for name, engine in config.engines.items():
        if engine.role not in ("rollout", "eval"):
            yield (
                ("engines", name, "role"),
                f'is "{engine.role}"; `miles rl` starts engines with role = "rollout" or "eval".',
            )


def _eval_engines(config: Config) -> Iterator[tuple[KeyPath, str]]:
    """Engines of its own for evaluation, if and only if it is to use them."""
    tables = [name for name, engine in config.engines.items() if engine.role == "eval"]
    if config.eval.mode == "dedicated" and not tables:
        yield (
            ("eval", "mode"),
            'is "dedicated" but no table [engines.NAME] has role = "eval". Add one, or use mode = "shared".',
        )
    for name in tables if config.eval.mode != "dedicated" else tables[1:]:
        why = "beside another one" if config.eval.mode == "dedicated" else f'but eval.mode is "{config.eval.mode}"'
        yield ("engines", name, "role"), f'is "eval" {why}: these engines would idle. Remove the table.'


def _low_precision(config: Config) -> Iterator[tuple[KeyPath, str]]:
    """Engines can hold what `[quant]` gives them."""
    if config.quant is None or not config.quant.quantize_activations:
        return
    try:
        quantization_config(config.quant)
    except QuantError as error:
        yield ("quant", "format"), f"is {config.quant.format!r}: {error}"
    for name, engine in config.engines.items():
        if not engine.urls and resolve_device(engine.device, engine.env) == "cpu":
            yield (
                ("quant", "quantize_activations"),
                f"is true but engines.{name} runs on a CPU, where SGLang has no kernels for codes. Set it to false: "
                "engines then get the values of the codes as plain weights, and training leaves activations alone.",
            )
    if config.sync.dtype not in ("auto", "keep"):
        yield ("sync", "dtype"), f'is "{config.sync.dtype}" but engines get codes and scales, which no cast survives.'


def _sft(config: Config) -> Iterator[tuple[KeyPath, str]]:
    if not config.sft.steps:
        yield ("sft", "steps"), "is 0; `miles sft` needs at least 1."
    if config.sft.data is None and not config.sft.steps:
        yield ("sft", "data"), "is not set. Set it to `module:function` that returns conversations."
