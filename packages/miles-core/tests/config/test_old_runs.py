"""A run directory that an earlier release made still resumes: its configuration is read in today's keys.

`old_config.json` is that of a quick start, as version 0.1.0 kept it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from miles_core.config import ConfigError, load_config, to_dict
from miles_core.config.keys import type_at
from miles_core.config.layers import MOVED, new_name
from miles_core.config.schema import Config
from miles_core.durable.fingerprint import compare


@pytest.fixture
def old() -> dict[str, Any]:
    return json.loads((Path(__file__).parent / "old_config.json").read_text(encoding="utf-8"))


def test_a_run_of_before_goes_on_as_the_same_run(old):
    loaded = load_config([], kind="rl", stored=old)
    assert compare({"config": old}, {"config": to_dict(loaded.config)}) == ([], [])
    assert loaded.config.train.loss.normalization == "token"
    assert loaded.warnings == load_config(["@", "quickstart"], kind="rl").warnings


def test_it_is_that_of_the_recipe_today(old):
    assert load_config([], kind="rl", stored=old).config == load_config(["@", "quickstart"], kind="rl").config


def test_its_settings_may_be_changed_and_what_it_learns_may_not(old):
    changed = load_config(["--train.loss.clip-low", "0.1", "--workers.count", "2"], kind="rl", stored=old).config
    assert compare({"config": old}, {"config": to_dict(changed)}) == (
        ["train.loss.clip_low was 0.2 and is 0.1."],
        ["workers.count was 1 and is 2."],
    )


def test_a_key_that_has_moved_is_refused_from_a_user_with_its_new_name(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text("[train]\nreshard_after_forward = false\n")
    with pytest.raises(ConfigError) as caught:
        load_config(["@", str(file), "--train.layout", "padded"])
    assert [str(problem) for problem in caught.value.problems] == [
        f"{file}: train.reshard_after_forward is now train.fsdp.reshard_after_forward. Write it there.",
        "--train.layout is now train.fsdp.layout. Write it there.",
    ]


def test_what_a_run_set_under_an_old_name_is_kept_and_compared(old):
    old["train"]["layout"] = "padded"
    config = load_config([], kind="rl", stored=old).config
    assert config.train.fsdp.layout == "padded"
    assert compare({"config": old}, {"config": to_dict(config)}) == ([], [])
    changed = load_config(["--train.fsdp.layout", "packed"], kind="rl", stored=old).config
    assert compare({"config": old}, {"config": to_dict(changed)}).allowed == [
        'train.fsdp.layout was "padded" and is "packed".'
    ]


def test_a_supervised_run_of_before_goes_on(old):
    old["train"]["loss"] |= {"kind": "sft"}
    assert load_config([], kind="sft", stored=old).config.train.loss.kind == "sft"


def test_every_key_that_has_moved_leads_to_one_that_there_is():
    for name in MOVED:
        path = tuple(name.split("."))
        assert type_at(Config, path) is None, f"{name} is a key again"
        assert type_at(Config, new_name(path) or ()) is not None
