"""`report.html`: one self-contained page about a run, finished or not; `compare.html` about several."""

from .write import ReportError, write, write_comparison

__all__ = ["ReportError", "write", "write_comparison"]
