"""Puts this folder on the path, so that tests and the rank scripts that they start share one helper module."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from staged_bed import BedEngine
from weightsync_fakes import FakeEngine, shm_names


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    fake = FakeEngine()
    yield fake
    fake.stop()


@pytest.fixture
def make_engine() -> Iterator[Callable[..., FakeEngine]]:
    fakes: list[FakeEngine] = []

    def make(**options: object) -> FakeEngine:
        fakes.append(FakeEngine(**options))  # type: ignore[arg-type]
        return fakes[-1]

    yield make
    for fake in fakes:
        fake.stop()


@pytest.fixture
def bed() -> Iterator[Callable[..., BedEngine]]:
    made: list[BedEngine] = []

    def make(**options: Any) -> BedEngine:
        made.append(BedEngine(**options))
        return made[-1]

    yield make
    for engine in made:
        engine.stop()


@pytest.fixture(autouse=True)
def no_shared_memory_is_left() -> Iterator[None]:
    yield
    assert shm_names() == []
