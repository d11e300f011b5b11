from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import settings
from miles_tito.records import Policy, Sampling

sys.path.insert(0, str(Path(__file__).parent))  # importlib mode adds nothing by itself

settings.register_profile("miles-envs", deadline=None)  # a shared machine stalls now and then
settings.load_profile("miles-envs")


@pytest.fixture
def scripted(monkeypatch):
    """`scripted(*replies)`: every environment and client made afterwards talks to that model."""
    from scripted_model import ScriptedModel, ScriptedPool

    def install(*replies):
        model = ScriptedModel(list(replies))

        def pool(**_) -> ScriptedPool:
            return ScriptedPool(model)

        monkeypatch.setattr("miles_envs.chat.connection_pool", pool)
        monkeypatch.setattr("miles_envs.shapes.multi_turn.connection_pool", pool)
        return model

    return install


@pytest.fixture
def policy() -> Policy:
    return Policy(base_url="http://session/v1", api_key="secret", model="m", sampling=Sampling(max_tokens=24))
