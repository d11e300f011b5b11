"""A ledger in a fresh folder, and the few events that lead a group through its life."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from miles_core.durable.ledger import Ledger, Limits

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    ledger = Ledger.open(tmp_path / "ledger.db", create=True)
    ledger.start(0, limits=Limits(max_staleness=2, credits=8, retries=1))
    yield ledger
    ledger.close()
