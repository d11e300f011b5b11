"""A stream of prompts: epochs, order, positions."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from miles_rollout import PromptError, PromptsExhausted, PromptStream
from miles_tito import Prompt
from scripted_rollout import make_prompts


def draw(stream: PromptStream, count: int) -> list[str]:
    return [stream.next().id for _ in range(count)]


def endless() -> Iterator[Prompt]:
    return (Prompt(id=f"e{i}") for i in itertools.count())


def test_d05_asking_for_more_than_an_epoch_continues_in_the_next() -> None:
    stream = PromptStream(make_prompts(3), shuffle=False)
    assert draw(stream, 8) == ["p0", "p1", "p2", "p0", "p1", "p2", "p0", "p1"]
    assert (stream.epoch, stream.offset) == (2, 2)


def test_d05_no_prompts_at_all_is_an_error_at_once() -> None:
    with pytest.raises(PromptError, match="no prompts: the sequence is empty"):
        PromptStream([])


def test_d08_every_epoch_has_all_prompts_in_its_own_order() -> None:
    stream = PromptStream(make_prompts(20), seed=3)
    epochs = [draw(stream, 20) for _ in range(3)]
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_d08_the_global_random_state_stays_as_it_is() -> None:
    before = random.getstate()
    draw(PromptStream(make_prompts(5), seed=1), 11)
    assert random.getstate() == before


def test_d08_the_order_is_the_same_in_every_process_and_differs_by_seed() -> None:
    code = (
        "from miles_rollout.prompts import PromptStream; from miles_tito import Prompt;"
        "s = PromptStream([Prompt(id=f'p{i}') for i in range(9)], seed=7); print(*[s.next().id for _ in range(12)])"
    )
    other = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONHASHSEED": "42"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout.split()
    assert other == draw(PromptStream(make_prompts(9), seed=7), 12)
    assert other != draw(PromptStream(make_prompts(9), seed=8), 12)


@given(st.integers(1, 9), st.integers(0, 30), st.booleans(), st.integers(0, 5))
def test_a_restored_stream_continues_where_it_was_saved(size: int, drawn: int, shuffle: bool, seed: int) -> None:
    stream = PromptStream(make_prompts(size), seed=seed, shuffle=shuffle)
    draw(stream, drawn)
    restored = PromptStream(make_prompts(size), seed=seed, shuffle=shuffle)
    restored.restore(stream.state())
    assert draw(restored, 12) == draw(stream, 12)


def test_a_restored_iterator_is_drawn_to_its_position() -> None:
    stream = PromptStream(endless())
    draw(stream, 5)
    restored = PromptStream(endless())
    restored.restore(stream.state())
    assert restored.next().id == "e5"
    with pytest.raises(PromptError, match="cannot go back: 6 prompts are drawn, the state says 5"):
        restored.restore(stream.state())


def test_a_position_in_other_data_is_refused_with_the_difference() -> None:
    state = PromptStream(make_prompts(3), seed=1).state()
    with pytest.raises(PromptError, match="num_prompts was 3 and is 4; seed was 1 and is 2"):
        PromptStream(make_prompts(4), seed=2).restore(state)
    with pytest.raises(PromptError, match="kind was sequence and is iterator"):
        PromptStream(endless()).restore(state)


def test_an_iterator_that_ends_says_after_how_many() -> None:
    stream = PromptStream(iter(make_prompts(2)))
    draw(stream, 2)
    with pytest.raises(PromptsExhausted, match="ended after 2"):
        stream.next()


def test_two_prompts_with_one_id_are_refused() -> None:
    with pytest.raises(PromptError, match="3 prompts have only 2 distinct ids; 'a' comes 2 times"):
        PromptStream([Prompt(id="a"), Prompt(id="b"), Prompt(id="a")])
