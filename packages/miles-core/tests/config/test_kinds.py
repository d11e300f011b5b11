"""A table whose `kind` says which keys it has: only the chosen kind's problems are told, and no key is dropped."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import pytest
from miles_core.config import Config, ConfigError, load_config, reference, to_dict, to_toml
from miles_core.config.keys import leaves, names_at, type_at, type_name
from miles_core.durable.fingerprint import compare
from miles_train import CustomLoss, PolicyLoss, SftLoss

OWN = CustomLoss(kind="my:loss", args={"coef": 1})


def loss_of(*words: str, stored: Mapping[str, Any] | None = None) -> PolicyLoss | SftLoss | CustomLoss:
    return load_config(words, stored=stored).config.train.loss


def problems_of(*words: str, stored: Mapping[str, Any] | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(words, stored=stored)
    return [str(problem) for problem in caught.value.problems]


def kept(**loss: object) -> dict[str, Any]:
    """A configuration as a run directory holds it, with these keys of the loss."""
    table = json.loads(json.dumps(to_dict(Config())))
    table["train"]["loss"] = loss
    return table


@pytest.mark.parametrize(
    ("words", "loss"),
    [
        ((), PolicyLoss()),
        (("--train.loss.clip-low", "0.3"), PolicyLoss(clip_low=0.3)),
        (("--train.loss.kind", "policy", "--train.loss.normalization", "token"), PolicyLoss(normalization="token")),
        (("--train.loss.kind", "sft", "--train.loss.normalization", "token"), SftLoss(normalization="token")),
        (("--train.loss.kind", "my:loss", "--train.loss.args.coef", "1"), OWN),
        (("--train.loss.args", "{coef = 1}", "--train.loss.kind", "my:loss"), OWN),
    ],
)
def test_kind_chooses_the_table(words, loss):
    assert loss_of(*words) == loss


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ("--train.loss.kind", "sft", "--train.loss.clip-low", "0.3", "--train.loss.kl-coef", "1.0"),
            [
                '--train.loss.clip-low belongs to kind "policy"; kind is "sft".',
                '--train.loss.kl-coef belongs to kind "policy"; kind is "sft".',
            ],
        ),
        (
            ("--train.loss.kind", "my:loss", "--train.loss.clip-low", "0.3"),
            ['--train.loss.clip-low belongs to kind "policy"; kind is "my:loss".'],
        ),
        (
            ("--train.loss.args.x", "1"),
            ['--train.loss.args.x: train.loss.args belongs to kind "module:function"; kind is "policy".'],
        ),
        (("--train.loss.clip-low", "3.0"), ["--train.loss.clip-low is 3.0; it must be between 0 and 1."]),
        (("--train.loss.clip-low", "x"), ['--train.loss.clip-low is "x"; it must be: number.']),
        (("--train.loss.clp-low", "3"), ["--train.loss.clp-low is no key. Did you mean train.loss.clip_low?"]),
        (("--train.loss", "5"), ["--train.loss is 5; it must be: a table."]),
        (
            ("--train.loss.kind", "polcy", "--train.loss.clip-low", "0.3"),
            ["--train.loss.kind is 'polcy'; it must be one of policy, sft, module:function. Did you mean policy?"],
        ),
    ],
)
def test_only_the_chosen_kinds_problems_are_told(words, told):
    assert problems_of(*words) == told


def test_what_a_run_kept_of_another_kind_at_its_default_is_left_out():
    loss = {"normalization": "token", "max_tokens": None, "log_entropy": True, "clip_low": 0.2, "dual_clip": None}
    assert loss_of(stored=kept(kind="sft", **loss)) == SftLoss(normalization="token")
    assert loss_of(stored=kept(kind="my:loss", **loss)) == CustomLoss(kind="my:loss", normalization="token")
    (told,) = problems_of(stored=kept(kind="my:loss", **{**loss, "clip_low": 0.3}))
    assert told == 'config.json: train.loss.clip_low belongs to kind "policy"; kind is "my:loss".'


def test_another_kind_than_a_run_kept_takes_over_what_both_have():
    stored = kept(kind="policy", normalization="token", clip_low=0.3)
    assert loss_of("--train.loss.kind", "sft", stored=stored) == SftLoss(normalization="token")
    changed = load_config(["--train.loss.kind", "sft"], stored=stored).config
    assert compare({"config": stored}, {"config": to_dict(changed)}).refused == [
        "train.loss.clip_low was 0.3 and is 0.2.",
        'train.loss.kind was "policy" and is "sft".',
    ]


def test_any_kind_is_written_so_that_it_loads_back(tmp_path):
    for loss in (PolicyLoss(clip_low=0.1), SftLoss(), OWN):
        config = replace(Config(), train=replace(Config().train, loss=loss))
        file = tmp_path / "resolved.toml"
        file.write_text(to_toml(config, explain=True), encoding="utf-8")
        assert load_config(["@", str(file)]).config == config
        assert load_config([], stored=json.loads(json.dumps(to_dict(config)))).config == config


def test_the_kinds_and_their_keys_are_explained():
    text = to_toml(replace(Config(), train=replace(Config().train, loss=OWN)), explain=True)
    table = text.split("\n[train.loss.args]")[0].rpartition("[train.loss]")[2]
    comment = " ".join(line.removeprefix("# ") for line in table.splitlines() if line.startswith("# "))
    assert "`policy`: The clipped policy gradient" in comment
    assert "Its own keys: clip_low, clip_high, dual_clip, old_logprobs," in comment
    assert "`module:function`: A function of your own" in comment
    assert "Its own keys: args." in comment
    assert "clip_low =" not in table
    assert "| `train.loss.clip_low` | number | `0.2` | With kind `policy`. The ratio is clipped at" in reference()
    assert '| `train.loss.kind` | "policy" \\| "sft" \\| text | `"policy"` | `policy`: The clipped' in reference()


@dataclass(frozen=True, slots=True, kw_only=True)
class Warm:
    """Heated."""

    kind: Literal["warm"] = "warm"
    degrees: int = 20
    """By how much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cold:
    """Cooled."""

    kind: Literal["cold"] = "cold"
    degrees: int = 5
    """By how much."""
    ice: bool = False
    """With ice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drink:
    """One glass."""

    state: Warm | Cold = field(default_factory=Cold)


def test_a_key_of_several_kinds_is_listed_once_where_they_agree():
    assert [(str(key), key.default, key.kinds) for key in leaves(Drink)] == [
        ("state.kind", "cold", ()),
        ("state.degrees", 20, ("warm",)),
        ("state.degrees", 5, ("cold",)),
        ("state.ice", False, ("cold",)),
    ]
    assert names_at(Drink, ("state",)) == ["kind", "degrees", "ice"]
    assert type_name(type_at(Drink, ("state", "kind"))) == '"warm" | "cold"'
    assert next(leaves(Drink)).doc == "`warm`: Heated. `cold`: Cooled. Its own keys: ice."
    listed = [str(key) for key in leaves(Config) if key.path[:2] == ("train", "loss")]
    assert len(listed) == len(set(listed))
