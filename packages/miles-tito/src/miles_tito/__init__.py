"""Token-in-token-out: records, sessions and exact joins."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.abc import MetaPathFinder
from typing import TYPE_CHECKING, Any

from .errors import (
    EngineError,
    MilesError,
    MissingDependency,
    RecordError,
    RequestError,
    SampleError,
    SessionError,
    TemplateError,
    TokenizerError,
    WireError,
)
from .records.episodes import Ctx, Env, Episode, EpisodeResult, FailedAttempt, Group, Outcome, to_samples
from .records.prompts import Message, Policy, Prompt, Sampling
from .records.summary import EpisodeSummary, GroupRef, TrajectorySummary, summarize
from .records.trajectories import UNKNOWN_VERSION, FinishReason, Sample, Trajectory, TrajectoryKind, VersionSpan

if TYPE_CHECKING:
    from .adapters.layouts import to_slime, to_trl, to_verl
    from .client import SessionClient
    from .engine.sglang import SGLangEngine
    from .server import create_app
    from .sessions.session import Session
    from .tokens.family_choice import probe_template
    from .tokens.template_checks import Finding
    from .tokens.tokenizer import Tokenizer, load_tokenizer
    from .verification import Report, verify

_LAZY = {
    name: module
    for module, names in {
        "adapters.layouts": ("to_slime", "to_trl", "to_verl"),
        "client": ("SessionClient",),
        "engine.sglang": ("SGLangEngine",),
        "server": ("create_app",),
        "sessions.session": ("Session",),
        "tokens.family_choice": ("probe_template",),
        "tokens.template_checks": ("Finding",),
        "tokens.tokenizer": ("Tokenizer", "load_tokenizer"),
        "verification": ("Report", "verify"),
    }.items()
    for name in names
}
"""Names whose modules load more than records need."""

_MOVED = {
    f"miles_tito.{old}": f"miles_tito.{new}"
    for old, new in {
        "families": "tokens.families, and `choose_family` miles_tito.tokens.family_choice",
        "layouts": "adapters.layouts",
        "merge": "tokens.merge",
        "routing": "engine.expert_routing",
        "wire": "records.encoding",
    }.items()
}
"""Documented modules of version 0.1 and where they are now."""


class _MovedModules(MetaPathFinder):
    """Import hook, asked last of all: a module that moved fails with its new name."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        if fullname in _MOVED:
            raise ModuleNotFoundError(f"{fullname} is now {_MOVED[fullname]}.", name=fullname)


sys.meta_path.append(_MovedModules())


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(f".{_LAZY[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["UNKNOWN_VERSION", "Ctx", "Env", "Episode", "EpisodeResult", "FailedAttempt", "FinishReason", "Group"]
__all__ += [
    "Message",
    "Outcome",
    "Policy",
    "Prompt",
    "Sample",
    "Sampling",
    "Trajectory",
    "TrajectoryKind",
    "VersionSpan",
]
__all__ += ["EpisodeSummary", "GroupRef", "TrajectorySummary", "summarize", "to_samples"]
__all__ += ["EngineError", "MilesError", "MissingDependency", "RecordError", "RequestError", "SampleError"]
__all__ += ["SessionError", "TemplateError", "TokenizerError", "WireError"]
__all__ += ["Finding", "Report", "Tokenizer", "load_tokenizer", "probe_template", "verify"]
__all__ += ["SGLangEngine", "Session", "SessionClient", "create_app", "to_slime", "to_trl", "to_verl"]
