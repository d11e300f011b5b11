"""Checks of values that a user set, one error for all of them."""

from __future__ import annotations

from miles_tito.errors import MilesError


class SettingError(MilesError, ValueError):
    """A setting holds a value that it cannot have; the message names both, and what would do."""


def require(fact: bool, name: str, value: object, wanted: str) -> None:
    """Raise unless `fact` holds: "`name` is value; it must be wanted."

    Raises:
        SettingError: it does not.
    """
    if not fact:
        raise SettingError(f"`{name}` is {value!r}; it must be {wanted}.")


def at_least(section: object, least: float, *names: str) -> None:
    """Check numbers of a section; None is no number and passes.

    Raises:
        SettingError: one is below `least`, or not a number.
    """
    for name in names:
        value = getattr(section, name)
        if value is not None and not value >= least:
            raise SettingError(f"`{name}` is {value}; it must be at least {least}.")
