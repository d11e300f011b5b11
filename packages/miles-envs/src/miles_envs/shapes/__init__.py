"""Environments for the usual forms of a task; subclass `MultiTurn` for others."""

from .multi_turn import Dialogue, MultiTurn
from .single_turn import SingleTurn
from .tool_loop import ToolLoop
from .tools import Tool

__all__ = ["Dialogue", "MultiTurn", "SingleTurn", "Tool", "ToolLoop"]
