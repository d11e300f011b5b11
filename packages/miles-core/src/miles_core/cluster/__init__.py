"""The driver's hands on the processes of a run. Only this package imports Ray.

trainers ── TrainerRank x ranks           fleet ── EngineServer x engines, Router when more than one
sessions ── SessionServer x n             workers ── RolloutWorker x n
"""

from .eval_engines import EvalEngines
from .fleet import EngineFleet
from .ray_session import cluster
from .remote import OnEvent, Remote, stop_together
from .sessions import SessionServers
from .trainers import TrainerLost, TrainerRanks
from .workers import RolloutWorkers

__all__ = [
    "EngineFleet",
    "EvalEngines",
    "OnEvent",
    "Remote",
    "RolloutWorkers",
    "SessionServers",
    "TrainerLost",
    "TrainerRanks",
    "cluster",
    "stop_together",
]

_RENAMED = {
    "Fleet": "EngineFleet",
    "RayParts": "Remote",
    "Trainers": "TrainerRanks",
    "Workers": "RolloutWorkers",
    "spawn": "Remote",
}


def __getattr__(name: str) -> object:
    new = _RENAMED.get(name)
    raise AttributeError(f"{__name__} has no {name!r}" + (f"; it is {new!r} now." if new else "."))
