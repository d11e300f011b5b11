"""The driver's hands on the cluster. Only this package imports Ray.

trainers ── TrainerActor x ranks          fleet ── EngineActor x engines, RouterActor when more than one
sessions ── SessionActor x n              workers ── WorkerActor x n
"""

from .fleet import Fleet
from .parts import RayParts
from .processes import cluster, spawn
from .sessions import SessionServers
from .trainers import Trainers
from .workers import Workers

__all__ = ["Fleet", "RayParts", "SessionServers", "Trainers", "Workers", "cluster", "spawn"]
