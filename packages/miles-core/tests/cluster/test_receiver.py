"""Engines are started as the way of pushing weights needs them."""

from __future__ import annotations

import pytest
from miles_core.run.starting import with_receiver
from miles_rollout.engines import EngineConfig
from miles_rollout.engines.command import server_command
from miles_weightsync.config import LOADER, PushConfig

STAGED = PushConfig(way="staged")


def command(config: EngineConfig) -> list[str]:
    return server_command(config, model_path="/m", host="127.0.0.1", port=1, weight_version=0)


@pytest.mark.parametrize("given", [(), ["my.loader"], "my.loader"])
def test_a_staged_push_finds_a_receiver_beside_the_loaders_of_the_user(given: str | list[str]) -> None:
    engines = EngineConfig(device="cpu", options={"custom-weight-loader": given} if given else {})
    words = command(with_receiver(engines, STAGED))
    start = words.index("--custom-weight-loader") + 1
    assert words[start : start + 1 + bool(given)] == ["my.loader"] * bool(given) + [LOADER]


def test_other_ways_and_running_engines_are_left_alone() -> None:
    engines = EngineConfig(device="cpu")
    assert with_receiver(engines, PushConfig()) == engines
    attached = EngineConfig(urls=("http://127.0.0.1:1",))
    assert with_receiver(attached, STAGED) == attached
