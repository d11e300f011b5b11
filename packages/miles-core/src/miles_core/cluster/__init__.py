"""The driver's hands on the cluster. Only this package imports Ray.

trainers ── TrainerActor x ranks          fleet ── EngineActor x engines, RouterActor when more than one
sessions ── SessionActor x n              workers ── WorkerActor x n
"""

from .fleet import Fleet
from .processes import cluster, spawn, stop_parts
from .sessions import SessionServers
from .trainers import Trainers
from .workers import Workers

__all__ = ["Fleet", "SessionServers", "Trainers", "Workers", "cluster", "spawn", "stop_parts"]
