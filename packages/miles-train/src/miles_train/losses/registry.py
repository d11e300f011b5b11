"""The kinds of loss. A new one is a file in this folder and its name in `AnyLoss`."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

from miles_tito.shared.settings import SettingError

from .custom import CustomLoss
from .inputs import LossFn
from .policy import PolicyLoss
from .sft import SftLoss

AnyLoss = PolicyLoss | SftLoss | CustomLoss
"""`[train.loss]`: its `kind` says which of them it is."""

BUILTIN: dict[str, Any] = {
    loss.__dataclass_fields__["kind"].default: loss for loss in typing.get_args(AnyLoss) if loss is not CustomLoss
}
"""Settings by kind."""


def LossConfig(*, kind: str = "policy", **keys: Any) -> AnyLoss:
    """The settings of a loss by its kind: `LossConfig(kind="policy", clip_high=0.3)` is `PolicyLoss(clip_high=0.3)`.

    Raises:
        SettingError: there is no such kind, or it does not have one of the keys.
    """
    if kind not in BUILTIN and ":" not in kind:
        raise SettingError(
            f"`kind` is {kind!r}; it must be one of {', '.join(BUILTIN)}, or `package.module:function` of your own."
        )
    settings = BUILTIN.get(kind, CustomLoss)
    if foreign := sorted(keys.keys() - _names(settings)):
        others = {f"kind {name!r}": _names(other) for name, other in BUILTIN.items()}
        others["a loss of your own"] = _names(CustomLoss)
        owners = " and ".join(name for name, has in others.items() if set(foreign) <= has) or "no kind of loss"
        verbs = ("belongs", "has") if len(foreign) == 1 else ("belong", "have")
        raise SettingError(
            f"{', '.join(f'`{key}`' for key in foreign)} {verbs[0]} to {owners} and {verbs[1]} no effect with "
            f"kind = {kind!r}."
        )
    return settings(kind=kind, **keys)


def resolve_loss(settings: AnyLoss) -> LossFn:
    """The function, its settings bound.

    Raises:
        ImportStringError: the user's own function is not there, or does not take its `args`.
    """
    return settings.function()


def _names(settings: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(settings)}
