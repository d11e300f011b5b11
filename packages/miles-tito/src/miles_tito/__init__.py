"""Token-in-token-out: records, sessions and exact joins."""

from __future__ import annotations

from importlib import import_module
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
from .export import to_samples
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
from .summary import EpisodeSummary, GroupRef, TrajectorySummary, summarize

if TYPE_CHECKING:
    from .client import SessionClient
    from .engine import SGLangEngine
    from .layouts import to_slime, to_trl, to_verl
    from .probe import Finding, probe_template
    from .server import create_app
    from .session import Session
    from .tokenizer import Tokenizer, load_tokenizer
    from .verification import Report, verify

_LAZY = {
    "Finding": "probe",
    "Report": "verification",
    "SGLangEngine": "engine",
    "Session": "session",
    "SessionClient": "client",
    "Tokenizer": "tokenizer",
    "create_app": "server",
    "load_tokenizer": "tokenizer",
    "probe_template": "probe",
    "to_slime": "layouts",
    "to_trl": "layouts",
    "to_verl": "layouts",
    "verify": "verification",
}
"""Names whose modules load more than records need."""


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
