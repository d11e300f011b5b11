"""What differs between model families, as data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How one model family writes an assistant turn. The chat template says the rest."""

    name: str
    close: str
    """The added token that ends an assistant turn; sampled, trained, and synthesised after a truncation."""
    reasoning: tuple[str, str] | None = None
    """Marks around reasoning at the start of a turn."""
    tool_call: tuple[str, str] | None = None
    """Marks around a JSON object with `name` and `arguments`."""
