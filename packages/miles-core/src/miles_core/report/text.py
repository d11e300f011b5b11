"""The one door through which text reaches the page: a model's, a user's and a file's text is hostile."""

from __future__ import annotations

from html import escape

from miles_core.text import visible


def safe(text: str) -> str:
    """`text` for the page, inside an element or a quoted attribute: no markup, nothing hidden or reordered."""
    return escape(visible(text))
