"""Why an evaluation failed, in one line that can be counted."""

from __future__ import annotations

from miles_rollout.guards import first_line

from miles_core.errors import cause


def why(error: BaseException, doing: str, *, timeout_s: float) -> str:
    """`error` came up while `doing` something."""
    found = cause(error)
    if isinstance(found, TimeoutError) and not str(found):
        return f"{doing} took longer than `eval.timeout_s` = {timeout_s:g} s"
    return f"{doing}: {type(found).__name__}: {first_line(str(found))}"
