"""The model folder of a run, and how long a conversation may be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from miles_core.actors.model_folder import ModelError, context_limit, prepare_model_folder
from miles_core.config import ModelConfig


def write_config(folder: Path, **fields: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def build_at(out: Path, *, positions: int = 64) -> None:
    """A builder that returns nothing."""
    write_config(out, max_position_embeddings=positions)


def build_elsewhere(out: Path) -> str:
    """A builder with a cache."""
    return str(write_config(out.parent / "cache"))


def build_nothing(out: Path) -> Path:
    return out


def builder(function: object) -> str:
    return f"{__name__}:{function.__name__}"  # pyright: ignore[reportAttributeAccessIssue]


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """With importmode=importlib a test module is known by a name of its own."""
    import sys
    import types

    module = types.ModuleType(__name__)
    for function in (build_at, build_elsewhere, build_nothing):
        setattr(module, function.__name__, function)
    monkeypatch.setitem(sys.modules, __name__, module)


def test_a_given_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "m")
    assert prepare_model_folder(ModelConfig(path=str(folder)), out=tmp_path / "out") == folder
    assert not (tmp_path / "out").exists()


def test_a_builder_writes_to_the_run_or_names_another_folder(tmp_path: Path) -> None:
    made = prepare_model_folder(
        ModelConfig(builder=builder(build_at), builder_args={"positions": 32}), out=tmp_path / "out"
    )
    assert made == tmp_path / "out"
    assert context_limit(ModelConfig(), made, token_budget=64) == 32
    cached = prepare_model_folder(ModelConfig(builder=builder(build_elsewhere)), out=tmp_path / "other")
    assert cached == tmp_path / "cache"


def test_what_an_earlier_start_has_built_is_taken_and_what_it_left_unfinished_is_not(tmp_path: Path) -> None:
    config = ModelConfig(builder=builder(build_at), builder_args={"positions": 32})
    left = tmp_path / "out.partial"
    left.mkdir()
    (left / "half").touch()
    made = prepare_model_folder(config, out=tmp_path / "out")
    assert [path.name for path in made.iterdir()] == ["config.json"]
    (made / "mark").touch()
    assert (prepare_model_folder(config, out=tmp_path / "out") / "mark").exists()


@pytest.mark.parametrize("make", ["path", "builder"])
def test_a_folder_without_config_json_is_refused(tmp_path: Path, make: str) -> None:
    config = ModelConfig(path=str(tmp_path)) if make == "path" else ModelConfig(builder=builder(build_nothing))
    with pytest.raises(ModelError, match=r"is no Hugging Face model folder: it has no config.json"):
        prepare_model_folder(config, out=tmp_path / "out")


def test_the_context_is_the_models_own_or_less(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "m", max_position_embeddings=128)
    assert context_limit(ModelConfig(), folder, token_budget=128) == 128
    assert context_limit(ModelConfig(max_context=100), folder, token_budget=128) == 100
    with pytest.raises(ModelError, match=r"`model\.max_context` is 129 but m was made for 128 positions"):
        context_limit(ModelConfig(max_context=129), folder, token_budget=128)


def test_a_model_that_names_no_limit_needs_one(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "m")
    assert context_limit(ModelConfig(max_context=100), folder, token_budget=128) == 100
    with pytest.raises(ModelError, match=r"no max_position_embeddings; set `model\.max_context`"):
        context_limit(ModelConfig(), folder, token_budget=128)


def test_a_conversation_must_fit_into_a_micro_batch(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "m", max_position_embeddings=40960)
    with pytest.raises(ModelError, match=r"may take 40960 tokens but `train.token_budget` is 8192, .* at most 8192"):
        context_limit(ModelConfig(), folder, token_budget=8192)
    assert context_limit(ModelConfig(max_context=8192), folder, token_budget=8192) == 8192
