"""Text of models, users and files as people see it, on a page or a terminal."""

from __future__ import annotations

import unicodedata

_HIDDEN = ("Cc", "Cf", "Co", "Cs", "Zl", "Zp")
"""Unicode categories that show nothing, or change how their neighbours are shown."""


def visible(text: str) -> str:
    """`text` with line ends, control, format and direction characters made visible."""
    return "".join(map(_visible, text))


def _visible(character: str) -> str:
    if character == "\n":
        return "⏎\n"
    return f"\\u{ord(character):04x}" if unicodedata.category(character) in _HIDDEN else character
