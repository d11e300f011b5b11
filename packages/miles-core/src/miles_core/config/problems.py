"""What is wrong with a configuration: who said it, which key, what to do. All of it at once."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from miles_tito.errors import MilesError


class Problem(NamedTuple):
    """One thing that the user has to correct: a line of a `ConfigError`."""

    source: str
    """File or flag that set the key, empty where nobody did."""
    key: str
    """Dotted path, empty where the whole source is meant."""
    message: str

    def __str__(self) -> str:
        if not self.source:
            return f"{self.key} {self.message}"
        is_same = self.source.startswith("--") and self.source[2:].replace("-", "_") == self.key.replace("-", "_")
        if not self.key or is_same:
            return f"{self.source} {self.message}"
        return f"{self.source}: {self.key} {self.message}"


class ConfigError(MilesError, ValueError):
    """A configuration cannot be used; `problems` has every reason. The command prints it and exits with 2."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        count = f"{len(self.problems)} problems" if len(self.problems) > 1 else "1 problem"
        super().__init__("\n".join([f"{count} in the configuration:", *(f"  {problem}" for problem in self.problems)]))


def own_message(error: Exception) -> str:
    """What the error of a section says, without the key that it begins with."""
    message = str(error)
    own = re.match(r"`[\w.\- ]+` (?=is )", message)
    return message[own.end() :] if own else f"is wrong: {message}"


def suggestion(wrong: str, known: Iterable[str], *, prefix: str = "") -> str:
    """` Did you mean …?`, or nothing where nothing is near."""
    near = difflib.get_close_matches(wrong, list(known), n=2, cutoff=0.6)
    return f" Did you mean {' or '.join(prefix + name for name in near)}?" if near else ""
