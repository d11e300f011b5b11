"""One fate at a time, one final fate, in bounded memory."""

from __future__ import annotations

import pytest
from miles_rollout import fates
from miles_rollout.errors import BufferStateError
from miles_rollout.fates import Fate, FateBook


def test_a_book_of_a_long_run_remembers_open_groups_and_the_last_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fates, "RECENT", 10)
    book = FateBook()
    book.issue("first", prompt_id="p", version=0)
    for number in range(1000):
        book.issue(f"g{number}", prompt_id="p", version=0)
        book.advance(f"g{number}", Fate.FILTERED, reason="", version=0)
    assert (book.fate("first"), book.fate("g990"), book.fate("g989")) == (Fate.IN_FLIGHT, Fate.FILTERED, None)
    with pytest.raises(BufferStateError, match="'g999' is already filtered"):
        book.advance("g999", Fate.STALE, reason="", version=0)
    with pytest.raises(BufferStateError, match="ended more than 10 groups ago"):
        book.advance("g1", Fate.STALE, reason="", version=0)
    counts = book.counts()
    assert (counts.issued, counts.filtered, counts.in_flight, counts.lost, counts.twice) == (1001, 1000, 1, 0, 1)
    book.advance("first", Fate.ABORTED, reason="", version=0)
    assert book.counts().in_flight == 0
