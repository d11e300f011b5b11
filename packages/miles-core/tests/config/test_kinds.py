"""A table whose `kind` says which keys it has: only the chosen kind's problems are told, and no key is dropped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from miles_core.config import layers, load, moved, show
from miles_core.config.keys import leaves, names_at, type_at, type_name
from pydantic import TypeAdapter


@dataclass(frozen=True, slots=True, kw_only=True)
class Clipped:
    """Rewards."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    kind: Literal["clipped"] = "clipped"
    """What is minimised."""
    scale: Literal["token", "episode"] = "episode"
    """How tokens are averaged."""
    clip_low: float = 0.2
    """Lower bound."""
    betas: tuple[float, float] = (0.5, 0.5)
    """A pair."""

    def __post_init__(self) -> None:
        if not 0 < self.clip_low < 1:
            raise ValueError(f"`clip_low` is {self.clip_low}; it must be between 0 and 1.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Imitating:
    """No rewards."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    kind: Literal["imitating"] = "imitating"
    scale: Literal["token", "episode"] = "token"
    """How tokens are averaged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Own:
    """The user's."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    kind: str
    args: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Its arguments."""

    def __post_init__(self) -> None:
        if ":" not in self.kind:
            raise ValueError(f"`kind` is {self.kind!r}; it must be an import string.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A section."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    loss: Clipped | Imitating | Own = field(default_factory=Clipped)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schema:
    """A configuration."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    train: Section = field(default_factory=Section)


@pytest.fixture(autouse=True)
def schema(monkeypatch):
    for module in (layers, load, moved, show):
        monkeypatch.setattr(module, "Config", Schema)
    monkeypatch.setattr(load, "_ADAPTER", TypeAdapter(Schema))


def loaded(*words: str, stored: Mapping[str, Any] | None = None) -> tuple[Any, list[str]]:
    read = layers.read_layers(words)
    if stored is not None:
        read = read.over(moved.translate(stored))
    config, problems, _ = load.validate(read)
    return config.train.loss, [str(problem) for problem in [*read.problems, *problems]]


@pytest.mark.parametrize(
    ("words", "loss"),
    [
        ((), Clipped()),
        (("--train.loss.clip-low", "0.3"), Clipped(clip_low=0.3)),
        (("--train.loss.kind", "imitating"), Imitating()),
        (("--train.loss.kind", "my:loss", "--train.loss.args.x", "1"), Own(kind="my:loss", args={"x": 1})),
    ],
)
def test_kind_chooses_the_table(words, loss):
    assert loaded(*words) == (loss, [])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ("--train.loss.kind", "imitating", "--train.loss.clip-low", "0.3"),
            ['--train.loss.clip-low belongs to kind "clipped"; kind is "imitating".'],
        ),
        (
            ("--train.loss.kind", "my:loss", "--train.loss.scale", "token"),
            ['--train.loss.scale belongs to kind "clipped" and "imitating"; kind is "my:loss".'],
        ),
        (
            ("--train.loss.args.x", "1"),
            ['--train.loss.args.x: train.loss.args belongs to kind "module:function"; kind is "clipped".'],
        ),
        (("--train.loss.clip-low", "3.0"), ["--train.loss.clip-low is 3.0; it must be between 0 and 1."]),
        (("--train.loss.clip-low", "x"), ['--train.loss.clip-low is "x"; it must be: number.']),
        (("--train.loss.clp-low", "3"), ["--train.loss.clp-low is no key. Did you mean train.loss.clip_low?"]),
        (("--train.loss", "5"), ["--train.loss is 5; it must be: a table."]),
        (
            ("--train.loss.kind", "cliped", "--train.loss.clip-low", "0.3"),
            [
                "--train.loss.kind is 'cliped'; it must be one of clipped, imitating, module:function. Did you mean "
                "clipped?"
            ],
        ),
    ],
)
def test_only_the_chosen_kinds_problems_are_told(words, told):
    assert loaded(*words)[1] == told


def test_what_a_run_kept_of_another_kind_at_its_default_is_left_out():
    kept = {"train": {"loss": {"kind": "imitating", "scale": "token", "clip_low": 0.2, "betas": [0.5, 0.5]}}}
    assert loaded(stored=kept) == (Imitating(), [])
    kept["train"]["loss"]["clip_low"] = 0.3
    assert loaded(stored=kept)[1] == [
        'config.json: train.loss.clip_low belongs to kind "clipped"; kind is "imitating".'
    ]


def test_another_kind_than_a_run_kept_takes_over_what_both_have():
    kept = {"train": {"loss": {"kind": "clipped", "scale": "episode", "clip_low": 0.3}}}
    assert loaded("--train.loss.kind", "imitating", stored=kept) == (Imitating(scale="episode"), [])


def test_a_key_that_has_moved_is_refused_from_a_user_and_read_from_a_run(monkeypatch):
    monkeypatch.setattr(moved, "MOVED", {"train.clip": "train.loss.clip_low", "objective": "train.loss"})
    assert loaded("--train.clip", "0.3")[1] == ["--train.clip is now train.loss.clip_low. Write it there."]
    assert loaded("--objective.scale", "token")[1] == [
        "--objective.scale: objective is now train.loss. Write it there."
    ]
    assert loaded(stored={"train": {"clip": 0.3}}) == (Clipped(clip_low=0.3), [])
    assert loaded(stored={"objective": {"kind": "imitating"}}) == (Imitating(), [])


def test_each_key_is_listed_with_the_kinds_that_have_it():
    assert [(str(key), key.kinds) for key in leaves(Schema)] == [
        ("train.loss.kind", ()),
        ("train.loss.scale", ("clipped",)),
        ("train.loss.clip_low", ("clipped",)),
        ("train.loss.betas", ("clipped",)),
        ("train.loss.scale", ("imitating",)),  # with another default
        ("train.loss.args", ("module:function",)),
    ]
    assert names_at(Schema, ("train", "loss")) == ["kind", "scale", "clip_low", "betas", "args"]
    assert type_name(type_at(Schema, ("train", "loss", "kind"))) == '"clipped" | "imitating" | text'
    assert "| `train.loss.clip_low` | number | `0.2` | With kind `clipped`. Lower bound. |" in show.reference()


def test_the_kinds_and_their_keys_are_explained():
    text = show.to_toml(Schema(train=Section(loss=Own(kind="my:loss", args={"x": 1}))), explain=True)  # pyright: ignore[reportArgumentType]
    head, kind, args = text.split("\n", 1)[0], text.split("kind = ")[0], text.split("kind = ")[1]
    assert head == "[train.loss]"
    assert " ".join(kind.replace("#", "").split()[1:]) == (
        "What is minimised. The kinds and their keys: `clipped` has scale, clip_low, betas; `imitating` has scale; "
        "`module:function` has args."
    )
    assert args == '"my:loss"\n\n# Its arguments.\n[train.loss.args]\nx = 1\n'
