"""Runs inside every rank of an engine: takes new weights in while requests run, and commits them in one short pause."""

from __future__ import annotations

from .entry import load
from .receiver import Receiver

__all__ = ["Receiver", "load"]
