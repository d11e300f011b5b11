"""`miles doctor`: what would keep a run from working on this machine, and how to mend it."""

from .diagnose import diagnose
from .finding import Finding, to_json, to_text

__all__ = ["Finding", "diagnose", "to_json", "to_text"]
