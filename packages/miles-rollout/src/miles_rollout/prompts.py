"""An endless stream of prompts whose position can be saved."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from miles_tito import Prompt

from .errors import PromptError, PromptsExhausted

PromptState = Mapping[str, "str | int | bool"]
"""Plain data for a checkpoint."""


class PromptSource(Protocol):
    """Where the producer gets its prompts; `PromptStream` is one."""

    @property
    def drawn(self) -> int:
        """Prompts given out so far, over all epochs: where a resumed run goes on."""
        ...

    def next(self) -> Prompt: ...


class PromptStream:
    """Prompts of a sequence, epoch after epoch, or of an iterator, one after the other, for the producer.

    A sequence is shuffled anew for each epoch by a generator of its own, seeded with seed and epoch: the same
    order in every process, and Python's global random state stays as it is. An iterator is never shuffled and
    should not end.
    """

    def __init__(self, prompts: Iterable[Prompt], *, seed: int = 0, shuffle: bool = True) -> None:
        self._seed = seed
        self._shuffle = shuffle
        self._drawn = 0
        self._sequence: Sequence[Prompt] | None = None
        self._iterator: Iterator[Prompt] | None = None
        if isinstance(prompts, Sequence):
            self._sequence = prompts
            _check_sequence(prompts)
            self._order = self._epoch_order(0)
        else:
            self._iterator = iter(prompts)

    @property
    def drawn(self) -> int:
        return self._drawn

    @property
    def epoch(self) -> int:
        """Of the next prompt; always 0 for an iterator."""
        return self._drawn // len(self._sequence) if self._sequence is not None else 0

    @property
    def offset(self) -> int:
        """Of the next prompt inside its epoch."""
        return self._drawn % len(self._sequence) if self._sequence is not None else self._drawn

    def next(self) -> Prompt:
        """The next prompt.

        Raises:
            PromptsExhausted: the iterator ended.
        """
        if self._sequence is not None:
            if self.offset == 0:
                self._order = self._epoch_order(self.epoch)
            prompt = self._sequence[self._order[self.offset]]
        else:
            assert self._iterator is not None, "a PromptStream has a sequence or an iterator"
            try:
                prompt = next(self._iterator)
            except StopIteration:
                raise PromptsExhausted(
                    f"The iterator of prompts ended after {self._drawn}. Give a list to repeat prompts in epochs, "
                    "or a generator that never ends."
                ) from None
        self._drawn += 1
        return prompt

    def state(self) -> PromptState:
        """The position, to be saved with a checkpoint."""
        if self._sequence is None:
            return {"kind": "iterator", "drawn": self._drawn}
        return {
            "kind": "sequence",
            "drawn": self._drawn,
            "num_prompts": len(self._sequence),
            "seed": self._seed,
            "shuffle": self._shuffle,
        }

    def restore(self, state: PromptState) -> None:
        """Continue where `state` was saved. An iterator is drawn from until it is there.

        Raises:
            PromptError: the state belongs to other prompts, or this stream is ahead of it already.
        """
        differing = [
            f"{name} was {state.get(name)} and is {value}"
            for name, value in self.state().items()
            if name != "drawn" and state.get(name) != value
        ]
        if differing:
            raise PromptError(
                f"The saved position does not fit these prompts: {'; '.join(differing)}. "
                "Resume with the data, seed and shuffling that the run was started with."
            )
        drawn = int(state["drawn"])
        if self._sequence is not None:
            self._drawn = drawn
            self._order = self._epoch_order(self.epoch)
            return
        if drawn < self._drawn:
            raise PromptError(f"An iterator cannot go back: {self._drawn} prompts are drawn, the state says {drawn}.")
        while self._drawn < drawn:
            self.next()

    def _epoch_order(self, epoch: int) -> list[int]:
        """Indices of the prompts in the order of an epoch."""
        assert self._sequence is not None, "only a sequence has epochs"
        order = list(range(len(self._sequence)))
        if self._shuffle:
            random.Random(f"{self._seed}/{epoch}").shuffle(order)  # a string seed does not depend on PYTHONHASHSEED
        return order


def _check_sequence(prompts: Sequence[Prompt]) -> None:
    if not prompts:
        raise PromptError("There are no prompts: the sequence is empty. Check the path, the split and any filter.")
    counts = Counter(prompt.id for prompt in prompts)
    if len(counts) < len(prompts):
        prompt_id, count = counts.most_common(1)[0]
        raise PromptError(
            f"{len(prompts)} prompts have only {len(counts)} distinct ids; {prompt_id!r} comes {count} times. "
            "Groups and evaluation are keyed by the id, so each prompt needs its own."
        )
