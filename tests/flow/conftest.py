"""The flow tests play against the same scripts as the tests of the packages."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

PACKAGES = Path(__file__).parents[2] / "packages"

sys.path[:0] = [
    str(Path(__file__).parent),
    str(Path(__file__).parents[1]),
    str(PACKAGES / "miles-core" / "tests"),
    str(PACKAGES / "miles-rollout" / "tests"),
    str(PACKAGES / "miles-weightsync" / "tests"),
]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from miles_train.models import build_tiny

    return build_tiny(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def engine() -> Iterator[Any]:
    """Answers three random tokens and the end of the turn."""
    from fake_sglang import FakeSGLang

    rng = random.Random(0)

    def script(ids: Sequence[int]) -> list[int]:
        return [rng.randrange(300, 440) for _ in range(3)] + [2]

    fake = FakeSGLang(script)
    yield fake
    fake.stop()


@pytest.fixture
def miles(tmp_path: Path, model: Path, engine: Any) -> Iterator[Callable[..., Any]]:
    """Starts the command beside a configuration and the environment that it names."""
    from miles_command import CONFIG, ENV, Command

    (tmp_path / "nap.py").write_text(ENV)
    (tmp_path / "run.toml").write_text(CONFIG.format(model=model, url=engine.url))
    started: list[Command] = []

    def start(*words: str) -> Command:
        started.append(Command(tmp_path, *words))
        return started[-1]

    yield start
    for command in started:
        command.kill()
