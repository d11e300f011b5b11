"""The prompts of an environment, by split."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from miles_tito.records import Prompt

from .data import read_prompts
from .errors import EnvironmentSetupError

Source = str | Iterable[Prompt] | Callable[[], Iterable[Prompt]]
"""A data file (`"train.jsonl@[0:900]"`), prompts, or a function that returns them."""
Prompts = Mapping[str, Source]
"""Sources by the name of their split, such as `train` and `heldout`."""


def prompts_of(prompts: Prompts, split: str) -> Iterable[Prompt]:
    """The prompts of `split`.

    Raises:
        EnvironmentSetupError: there is no such split.
        DataError: its file holds something else than prompts.
    """
    if split not in prompts:
        raise EnvironmentSetupError(
            f"There is no split {split!r}; this environment has {', '.join(map(repr, prompts))}."
        )
    source = prompts[split]
    if isinstance(source, str):
        return read_prompts(source)
    return source() if callable(source) else source
