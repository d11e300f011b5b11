"""A plug-in is one key that takes a name, or a table with a name and arguments; lists of them are too."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from miles_core.config import Config, ConfigError, load_config, reference, to_dict, to_toml
from miles_core.config.keys import type_at, type_name
from miles_core.durable.fingerprint import compare
from miles_tito.shared.plugins import Plugin

SCALED = Plugin(name="mine:f", args={"scale": 2})


def advantage_of(*words: str, stored: Config | None = None) -> str | Plugin:
    kept = None if stored is None else json.loads(json.dumps(to_dict(stored)))
    return load_config(words, stored=kept).config.rollout.advantage


@pytest.fixture
def file(tmp_path):
    def write(advantage: str) -> str:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.toml"
        path.write_text(f"[rollout]\nadvantage = {advantage}\n")
        return str(path)

    return write


@pytest.mark.parametrize(
    "words",
    [
        ("--rollout.advantage", "mine:f", "--rollout.advantage.args.scale", "2"),
        ("--rollout.advantage.args.scale", "2", "--rollout.advantage", "mine:f"),
        ("--rollout.advantage.name", "mine:f", "--rollout.advantage.args", "{scale = 2}"),
        ("--rollout.advantage", '{name = "mine:f", args = {scale = 2}}'),
    ],
)
def test_name_and_arguments_come_together_however_they_are_written(words):
    assert advantage_of(*words) == SCALED


def test_a_name_alone_stays_text():
    assert advantage_of("--rollout.advantage", "mine:f") == "mine:f"


def test_arguments_are_laid_over_the_name_of_a_file_below(file):
    assert advantage_of("@", file('"mine:f"'), "--rollout.advantage.args.scale", "2") == SCALED
    given = file('{ name = "mine:f", args = { scale = 1, shift = 3 } }')
    assert advantage_of("@", given, "--rollout.advantage.args.scale", "2") == Plugin(
        name="mine:f", args={"scale": 2, "shift": 3}
    )


def test_another_name_starts_without_the_arguments_of_the_one_below(file):
    given = file('{ name = "other:f", args = { shift = 3 } }')
    assert advantage_of("@", given, "@", file('{ name = "mine:f", args = { scale = 2 } }')) == SCALED
    assert advantage_of("@", given, "--rollout.advantage", "mine:f", "--rollout.advantage.args.scale", "2") == SCALED
    assert advantage_of("@", given, "--rollout.advantage", "mine:f") == "mine:f"


def test_arguments_are_laid_over_what_a_run_kept():
    default = Config()
    stored = replace(default, rollout=replace(default.rollout, advantage="mine:f"))
    assert advantage_of("--rollout.advantage.args.scale", "2", stored=stored) == SCALED
    assert advantage_of(stored=replace(default, rollout=replace(default.rollout, advantage=SCALED))) == SCALED


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--rollout.filter", "5"), "--rollout.filter is '5'. No filter is called '5'. Built in:"),
        (("--rollout.filter.args.x", "5"), "--rollout.filter.args.x: rollout.filter needs `name`."),
        (("--rollout.filter.name", "a:b", "--rollout.filter.nmae", "x"), "no key. Did you mean rollout.filter.name"),
        (
            ("--rollout.filter.name", "a:b", "--rollout.filter.args", "2"),
            "--rollout.filter.args is 2; it must be: table.",
        ),
        (("--monitor.custom", "a:b"), '--monitor.custom is "a:b"; it must be: list of (text | {name, args}).'),
        (("--monitor.custom", '[{nmae = "a:b"}]'), "it must be: list of (text | {name, args})."),
    ],
)
def test_what_is_no_plugin_is_told_with_its_key_once(words, told):
    with pytest.raises(ConfigError) as caught:
        load_config(words)
    (problem,) = map(str, caught.value.problems)
    assert told in problem


def test_a_list_of_plugins_holds_names_and_tables():
    config = load_config(["--monitor.custom", '["a:B", {name = "c:D", args = {x = 1}}]']).config
    assert config.monitor.custom == ("a:B", Plugin(name="c:D", args={"x": 1}))


def test_plugins_are_written_so_that_they_load_back(tmp_path):
    words = ["--rollout.advantage", "mine:f", "--rollout.advantage.args.scale", "2"]
    config = load_config([*words, "--monitor.custom", '["a:B", {name = "c:D", args = {x = 1}}]']).config
    file = tmp_path / "resolved.toml"
    file.write_text(to_toml(config, explain=True), encoding="utf-8")
    assert load_config(["@", str(file)]).config == config
    assert "# grpo, dr_grpo" in file.read_text()
    loaded = load_config(words)
    text = to_toml(loaded.config, sources=loaded.sources)
    assert 'name = "mine:f"  # --rollout.advantage\n' in text
    assert "scale = 2  # --rollout.advantage.args.scale\n" in text
    assert "| `rollout.advantage` | text \\| {name, args} |" in reference()
    assert type_name(type_at(Config, ("rollout", "advantage", "name"))) == "text"


def test_a_run_does_not_go_on_with_other_arguments():
    def with_advantage(advantage: str | Plugin) -> dict[str, Any]:
        return {"config": to_dict(replace(Config(), rollout=replace(Config().rollout, advantage=advantage)))}

    assert compare(with_advantage("mine:f"), with_advantage(Plugin(name="mine:f"))) == ([], [])
    by_hand = with_advantage("grpo")
    by_hand["config"]["rollout"]["advantage"] = {"name": "mine:f"}  # in config.json
    assert compare(by_hand, with_advantage("mine:f")) == ([], [])
    assert compare(with_advantage("mine:f"), with_advantage(SCALED)).refused == [
        "rollout.advantage.args.scale was absent and is 2."
    ]
    assert compare(with_advantage("grpo"), with_advantage(Plugin(name="mine:f"))).refused == [
        'rollout.advantage was "grpo" and is "mine:f".'
    ]
