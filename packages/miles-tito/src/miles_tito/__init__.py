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
from .records import (
    UNKNOWN_VERSION,
    Ctx,
    Env,
    Episode,
    EpisodeResult,
    FailedAttempt,
    FinishReason,
    Group,
    Message,
    Outcome,
    Policy,
    Prompt,
    Sample,
    Sampling,
    Trajectory,
    TrajectoryKind,
    VersionSpan,
)
from .records.samples import to_samples
from .records.summary import EpisodeSummary, GroupRef, TrajectorySummary, summarize

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
    "Finding": "tokens.template_checks",
    "Report": "verification",
    "SGLangEngine": "engine.sglang",
    "Session": "sessions.session",
    "SessionClient": "client",
    "Tokenizer": "tokens.tokenizer",
    "create_app": "server",
    "load_tokenizer": "tokens.tokenizer",
    "probe_template": "tokens.family_choice",
    "to_slime": "adapters.layouts",
    "to_trl": "adapters.layouts",
    "to_verl": "adapters.layouts",
    "verify": "verification",
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
    """Asked last of all for a module that nobody else finds: an old name fails with the new one."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        if fullname in _MOVED:
            raise ModuleNotFoundError(f"{fullname} is now {_MOVED[fullname]}.", name=fullname)


sys.meta_path.append(_MovedModules())


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(f".{_LAZY[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "UNKNOWN_VERSION",
    "Ctx",
    "EngineError",
    "Env",
    "Episode",
    "EpisodeResult",
    "EpisodeSummary",
    "FailedAttempt",
    "Finding",
    "FinishReason",
    "Group",
    "GroupRef",
    "Message",
    "MilesError",
    "MissingDependency",
    "Outcome",
    "Policy",
    "Prompt",
    "RecordError",
    "Report",
    "RequestError",
    "SGLangEngine",
    "Sample",
    "SampleError",
    "Sampling",
    "Session",
    "SessionClient",
    "SessionError",
    "TemplateError",
    "Tokenizer",
    "TokenizerError",
    "Trajectory",
    "TrajectoryKind",
    "TrajectorySummary",
    "VersionSpan",
    "WireError",
    "create_app",
    "load_tokenizer",
    "probe_template",
    "summarize",
    "to_samples",
    "to_slime",
    "to_trl",
    "to_verl",
    "verify",
]
