"""From a loss setting to the function."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any, cast

from miles_train.config import LossConfig
from miles_train.errors import ConfigError

from .inputs import LossFn
from .policy import policy_loss
from .sft import sft_loss


def resolve_loss(config: LossConfig) -> LossFn:
    """The built-in loss of that name, or the user's own function from its import string."""
    match config.kind:
        case "policy":
            return partial(
                policy_loss,
                clip_low=config.clip_low,
                clip_high=config.clip_high,
                dual_clip=config.dual_clip,
                tis_cap=config.tis_cap,
                kl_coef=config.kl_coef,
                kl_estimator=config.kl_estimator,
                entropy_coef=config.entropy_coef,
            )
        case "sft":
            return sft_loss
        case path:
            return _imported(path)


def _imported(path: str) -> LossFn:
    module_name, _, name = path.partition(":")
    try:
        found: Any = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"`loss.kind` is {path!r} but importing it failed: {error}. Give `package.module:function` that Python "
            "can import from where the run starts."
        ) from error
    if not callable(found):
        raise ConfigError(f"`loss.kind` is {path!r}, which is a {type(found).__name__}, not a function.")
    return cast(LossFn, found)
