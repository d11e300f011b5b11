"""The user's own loss, named by an import string, with arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from miles_tito.shared.plugins import check_call, load
from miles_tito.shared.settings import SettingError, require

from .settings import NEEDS, LossSettings, Need

if TYPE_CHECKING:
    from .inputs import LossFn


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomLoss(LossSettings):
    """A function of your own that takes `LossInputs` and returns `TokenLoss`; `needs` declares what it asks for."""

    kind: str
    """A built-in kind, or `package.module:function` of your own that takes `LossInputs` and returns `TokenLoss`."""
    args: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Keyword arguments of the function."""

    def __post_init__(self) -> None:
        LossSettings.__post_init__(self)
        require(":" in self.kind, "kind", self.kind, "the name of a built-in loss, or `package.module:function`")

    @property
    def needs(self) -> frozenset[Need]:
        declared = frozenset(getattr(self._load(), "needs", ()))
        unknown = sorted(declared - set(NEEDS))
        if unknown:
            raise SettingError(f"`needs` of {self.kind} is {unknown}; it must be among {', '.join(NEEDS)}.")
        return cast("frozenset[Need]", declared)

    def function(self) -> LossFn:
        """The function, its arguments bound.

        Raises:
            ImportStringError: there is no such function, or it cannot be called like this.
            SettingError: it needs what no trainer computes.
        """
        found, _ = self._load(), self.needs
        return partial(found, **self.args) if self.args else found

    def _load(self) -> Any:
        """Import the function and check that it takes `args`.

        Raises:
            ImportStringError: there is no such function, or it cannot be called like this.
        """
        found = load(self.kind, what="train.loss.kind")
        check_call(found, 1, self.args, what="train.loss.kind", target=self.kind)
        return found
