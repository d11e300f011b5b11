"""What can go wrong with an engine besides a refused request (`miles_tito.errors.EngineError`)."""

from __future__ import annotations

from miles_tito.errors import EngineError, MilesError
from miles_tito.shared.settings import SettingError

EngineConfigError = SettingError
"""An older name."""


class EngineVersionError(MilesError, RuntimeError):
    """SGLang, the router, or a package they need is absent or not a version that Miles was tested with."""


class EngineStartError(EngineError):
    """A server did not come up; the message ends with the last lines of its log."""


class EngineDied(EngineError):
    """A server that was up has exited without being asked to."""


class EngineStateError(MilesError, RuntimeError):
    """An engine was to enter a state that cannot follow the one it is in."""


class FleetLostError(EngineError):
    """No engine is left, or none came back in time; the message has the last lines of each one's log."""
