"""The one door through which text reaches the page: a model's, a user's and a file's text is hostile."""

from __future__ import annotations

import unicodedata
from html import escape

_HIDDEN = ("Cc", "Cf", "Co", "Cs", "Zl", "Zp")
"""Unicode categories that show nothing, or change how their neighbours are shown."""


def safe(text: str) -> str:
    """`text` for the page, inside an element or a quoted attribute: no markup, nothing hidden or reordered."""
    return escape(visible(text))


def visible(text: str) -> str:
    """`text` with line ends, control, format and direction characters made visible."""
    return "".join(map(_visible, text))


def _visible(character: str) -> str:
    if character == "\n":
        return "⏎\n"
    return f"\\u{ord(character):04x}" if unicodedata.category(character) in _HIDDEN else character
