"""The commit protocol from the trainer's side: prepare, verify, commit, serve."""

from __future__ import annotations

from .check import Differences
from .pushes import Result, StagedPushes

__all__ = ["Differences", "Result", "StagedPushes"]
