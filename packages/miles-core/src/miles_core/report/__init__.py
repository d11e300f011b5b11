"""`report.html`: one self-contained page about a run, finished or not."""

from .write import ReportError, write

__all__ = ["ReportError", "write"]
