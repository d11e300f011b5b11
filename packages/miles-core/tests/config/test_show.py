from __future__ import annotations

import json
import tomllib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from miles_core.config import load_config, reference, to_dict, to_toml
from miles_core.config.keys import field_docs, leaves, type_at, type_name
from miles_core.config.schema import Config
from miles_core.config.show import _value

WORDS = [
    *("--model.path", "m", "--run.name", 'quo"te', "--train.optimizer.max-grad-norm", "none"),
    *("--rollout.sampling.stop", '["\\n", "é"]', "--env.target", "t:t", "--env.args.items", '[{a = 1}, {a = "x"}]'),
    *("--engines.a-b.options.mem-fraction-static", "0.8", "--train.optimizer.lr", "1e-7"),
]


@pytest.mark.parametrize("explain", [False, True])
def test_the_resolved_configuration_loads_back_to_the_same_one(tmp_path, explain):
    loaded = load_config(WORDS)
    file = tmp_path / "resolved.toml"
    file.write_text(to_toml(loaded.config, sources=loaded.sources, explain=explain), encoding="utf-8")
    assert load_config(["@", str(file)]).config == loaded.config


def test_a_value_says_who_set_it_and_what_it_is_for():
    loaded = load_config(["--rollout.group-size", "4"])
    text = to_toml(loaded.config, sources=loaded.sources, explain=True)
    assert "# Sibling episodes of one prompt, which share a baseline.\ngroup_size = 4  # --rollout.group-size\n" in text


def test_plain_data_survives_json():
    config = load_config(WORDS).config
    assert json.loads(json.dumps(to_dict(config))) == to_dict(config)


@settings(deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(min_size=1), inner, max_size=3),
        max_leaves=8,
    )
)
def test_any_plain_value_is_valid_toml(value):
    read = tomllib.loads(f"value = {_value(value)}")["value"]
    assert read == json.loads(json.dumps(value), object_hook=None) or "none" in _value(value)


def test_the_reference_lists_every_key():
    text = reference()
    for key in leaves(Config):
        assert f"| `{key}` |" in text
    assert "| `engines.NAME.tp` | whole number | `1` |" in text
    assert "| `eval.sampling.top_p` |" in text
    assert "| `eval.datasets.NAME.split` | text |" in text


def test_every_key_of_core_has_a_line_of_documentation():
    own = {"run", "model", "env", "eval", "sft", "ray", "sessions", "workers", "monitor"}
    undocumented = [
        str(key)
        for key in leaves(Config)
        if key.path[0] in own and not key.doc and not {"optimizer", "schedule", "sampling"} & set(key.path)
    ]
    assert not undocumented


def test_types_read_as_toml():
    assert type_name(type_at(Config, ("train", "optimizer", "betas"))) == "list of 2: number, number"
    assert type_name(type_at(Config, ("monitor", "console"))) == '"auto" | "rich" | "plain" | "off"'
    assert type_at(Config, ("rollout", "sampling", "nope")) is None


def test_docstrings_are_read_from_under_the_field():
    assert field_docs(Config)["engines"] == "A table for each kind of engine, `[engines.NAME]`."
    assert field_docs(Config).keys() == {"engines", "quant"}
