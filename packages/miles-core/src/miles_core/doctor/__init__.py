"""`miles doctor`: what would keep a run from working on this machine, and how to mend it."""

from .diagnose import diagnose
from .results import CheckResult, Finding, to_json, to_text

__all__ = ["CheckResult", "Finding", "diagnose", "to_json", "to_text"]
