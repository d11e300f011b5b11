"""SGLang servers: start, watch, pause, stop. What needs httpx is imported when it is first asked for."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from miles_rollout.engines.config import EngineConfig
from miles_rollout.engines.device import has_gpu, resolve_device
from miles_rollout.engines.errors import (
    EngineConfigError,
    EngineDied,
    EngineStartError,
    EngineStateError,
    EngineVersionError,
    FleetLostError,
)
from miles_rollout.engines.health import HealthConfig
from miles_rollout.engines.ports import PortReservation, is_port_free
from miles_rollout.engines.states import EngineEvent, EngineLife, EngineState
from miles_rollout.engines.supervisor import Supervisor
from miles_rollout.engines.versions import check_sglang, check_smg

if TYPE_CHECKING:
    from miles_rollout.engines.attached import AttachedServer
    from miles_rollout.engines.control import EngineControl, EngineLoad, EngineProbe, PauseMode
    from miles_rollout.engines.server import EngineServer, Progress

__all__ = [
    "AttachedServer",
    "EngineConfig",
    "EngineConfigError",
    "EngineControl",
    "EngineDied",
    "EngineEvent",
    "EngineLife",
    "EngineLoad",
    "EngineProbe",
    "EngineServer",
    "EngineStartError",
    "EngineState",
    "EngineStateError",
    "EngineVersionError",
    "FleetLostError",
    "HealthConfig",
    "PauseMode",
    "PortReservation",
    "Progress",
    "Supervisor",
    "check_sglang",
    "check_smg",
    "has_gpu",
    "is_port_free",
    "resolve_device",
]

_LAZY = {
    "AttachedServer": "attached",
    "EngineControl": "control",
    "EngineLoad": "control",
    "EngineProbe": "control",
    "EngineServer": "server",
    "PauseMode": "control",
    "Progress": "server",
}


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
