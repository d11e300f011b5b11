"""SGLang servers: start, watch, pause, stop.

config, command, versions        what is started, and whether it can be
server, attached, router         an engine of ours, one of somebody else, the router in front of several
process, guard                   the process under each, which leaves nothing behind
control                          the client of one engine
supervisor, supervised, states, health   the fleet: who serves, who is restarted
sglang_cpu                       SGLang without a GPU
"""

from miles_tito.shared.ports import PortReservation, is_port_free

from miles_rollout.engines.attached import AttachedServer
from miles_rollout.engines.config import EngineConfig, has_gpu, resolve_device
from miles_rollout.engines.control import EngineControl, EngineLoad, EngineProbe, PauseMode
from miles_rollout.engines.errors import (
    EngineConfigError,
    EngineDied,
    EngineStartError,
    EngineStateError,
    EngineVersionError,
    FleetLostError,
)
from miles_rollout.engines.health import HealthConfig
from miles_rollout.engines.server import EngineServer, Progress, StartProgress
from miles_rollout.engines.states import EngineEvent, EngineLife, EngineState
from miles_rollout.engines.supervisor import Supervisor
from miles_rollout.engines.versions import check_sglang, check_smg

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
    "StartProgress",
    "Supervisor",
    "check_sglang",
    "check_smg",
    "has_gpu",
    "is_port_free",
    "resolve_device",
]
