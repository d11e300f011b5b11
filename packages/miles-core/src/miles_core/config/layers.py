"""From the words of a command line to one table: files in the order given, then overrides; the last one wins.

@ recipe.toml @ mine.toml --rollout.group-size 16 --train.loss.kind=policy --eval.at-start

A key that had another name or place in an earlier release is from a user an error that says the new one. What a run
directory has kept is read as it was meant.
"""

from __future__ import annotations

import copy
import importlib.resources
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_origin

from .keys import KIND, KeyPath, fields, is_plugin, leaves, names_at, options, type_at, unions
from .problems import Problem, suggestion
from .schema import Config

RECIPES = Path(str(importlib.resources.files("miles_core"))) / "recipes"

MOVED: Mapping[str, str] = {
    "train.layout": "train.fsdp.layout",
    "train.activation_checkpointing": "train.fsdp.activation_checkpointing",
    "train.reshard_after_forward": "train.fsdp.reshard_after_forward",
}
"""Old name -> new name, of keys and of whole tables."""


@dataclass
class Layers:
    """Files and flags laid over one another, not yet validated: one table, and for every key who set it last."""

    table: dict[str, Any] = field(default_factory=dict)
    sources: dict[KeyPath, str] = field(default_factory=dict)
    files: list[Path] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def merge(self, table: Mapping[str, Any], source: str, path: KeyPath = ()) -> None:
        """Lay `table` over what is there; tables are merged, everything else is replaced."""
        for name, value in table.items():
            here = (*path, name)
            if isinstance(value, Mapping):
                put(self.table, here, self._below(here, value))
                self.merge(value, source, here)
            else:
                put(self.table, here, None if _means_none(value, here) else value)
            self.sources[here] = source

    def _below(self, path: KeyPath, table: Mapping[str, Any]) -> dict[str, Any]:
        """What `table` is laid over. Arguments of a plug-in belong to its name: another one starts without any."""
        below = get(self.table, path)
        if is_plugin(type_at(Config, path)):
            if isinstance(below, str):
                below = {"name": below}
                self.sources[*path, "name"] = self.sources[path]
            below = below or {}
            name = table.get("name", below.get("name"))
            return below if below.get("name", name) == name else {}
        return below if isinstance(below, dict) else {}

    def over(self, stored: Mapping[str, Any]) -> Layers:
        """These layers laid over a whole configuration that an earlier run kept, maybe under older names.

        Where they choose another kind of a table, what is kept of the table is what the new kind has too.
        """
        below = Layers(files=self.files, problems=self.problems)
        below.merge(translate(stored), "config.json")
        for union in unions(Config):
            chosen = union.chosen(get(self.table, (*union.path, KIND)))
            if chosen is not None and get(below.table, union.path):
                kept = {name: value for name, value in get(below.table, union.path).items() if name in fields(chosen)}
                put(below.table, union.path, kept)
        below.merge(self.table, "")
        below.sources.update(self.sources)
        return below


def read_layers(words: Sequence[str]) -> Layers:
    """Every file and override of `words`; what cannot be read is a problem, and the rest is read all the same."""
    layers = Layers()
    overrides: list[tuple[str, str | None]] = []
    for kind, first, second in _split(words):
        if kind == "file":
            _read_file(first, layers)
        elif kind == "override":
            overrides.append((first, second))
        else:
            layers.problems.append(
                Problem(first, "", "is no setting. Write `@ FILE` for a file, `--key value` for a key.")
            )
    # Whatever the order, `--rollout.advantage mine:f` comes before an argument of it, which it would replace.
    for path, flag, text in sorted(((key_path(flag), flag, text) for flag, text in overrides), key=_is_in_plugin):
        annotation = type_at(Config, path)
        if text is None and annotation is not None and bool not in options(annotation):
            layers.problems.append(Problem(f"--{flag}", ".".join(path), "needs a value."))
            continue
        table: dict[str, Any] = {}
        put(table, path, True if text is None else parse_value(text, annotation))
        layers.merge(table, f"--{flag}")
    return layers


def recipe_names() -> list[str]:
    """The recipes that are shipped, by name."""
    return sorted(file.stem for file in RECIPES.glob("*.toml"))


def find_file(name: str) -> Path | None:
    """The shipped recipe `name`, or the file; None where there is neither. A file needs a suffix or a folder."""
    if "/" not in name and (recipe := RECIPES / f"{name}.toml").is_file():
        return recipe
    path = Path(name).expanduser()
    return path if path.is_file() else None


def key_path(flag: str) -> KeyPath:
    """`rollout.group-size` -> ("rollout", "group_size"); names that the user chose stay as they are."""
    path: KeyPath = ()
    for part in flag.split("."):
        underscored = part.replace("-", "_")
        path = (*path, underscored if underscored in names_at(Config, path) else part)
    return path


def parse_value(text: str, annotation: Any) -> Any:
    """The value that `text` means for a key of this type; text that is no such value is kept for validation to name."""
    members = [option for option in options(annotation) if option is not type(None)]
    if all(option is str or get_origin(option) is Literal for option in members):
        return text
    if is_plugin(annotation) and not text.lstrip().startswith("{"):
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def get(table: Mapping[str, Any], path: KeyPath) -> Any:
    """The value at `path`, None where there is none."""
    value: Any = table
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def put(table: dict[str, Any], path: KeyPath, value: Any) -> None:
    """Set the value at `path`, making tables on the way."""
    for name in path[:-1]:
        if not isinstance(table.get(name), dict):
            table[name] = {}
        table = table[name]
    table[path[-1]] = value


def new_name(path: KeyPath) -> KeyPath | None:
    """Where the key is that was at `path`; None where there never was one."""
    for old, new in MOVED.items():
        parts = tuple(old.split("."))
        if path[: len(parts)] == parts:
            return (*new.split("."), *path[len(parts) :])
    return None


def translate(stored: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration that a run kept, in today's keys.

    A table of several kinds once had the keys of all of them: those of another kind are left out at their defaults,
    where they said nothing. Any other value stays, and is an error when the configuration is read.
    """
    table = copy.deepcopy(dict(stored))
    for old, new in MOVED.items():
        *parent, name = old.split(".")
        own = get(table, (*parent,))
        if isinstance(own, dict) and name in own:
            put(table, (*new.split("."),), own.pop(name))
    for union in unions(Config):
        own = get(table, union.path)
        chosen = union.chosen(own.get(KIND, union.default)) if isinstance(own, dict) else None
        if chosen is None:
            continue
        silent = {
            (key.path[-1], _plain(key.default))
            for kind in union.kinds.values()
            for key in leaves(kind)
            if key.path[-1] not in fields(chosen)
        }
        put(table, union.path, {name: v for name, v in own.items() if (name, _plain(v)) not in silent})
    return table


def _split(words: Sequence[str]) -> Iterator[tuple[str, str, str | None]]:
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word == "@":
            yield ("file", rest.pop(0), None) if rest else ("stray", "@", None)
        elif word.startswith("@"):
            yield "file", word[1:], None
        elif word.startswith("--") and len(word) > 2:
            flag, equals, text = word[2:].partition("=")
            if not equals and rest and not rest[0].startswith(("--", "@")):
                text, equals = rest.pop(0), "="
            yield "override", flag, text if equals else None
        else:
            yield "stray", word, None


def _read_file(name: str, layers: Layers) -> None:
    path = find_file(name)
    if path is None:
        hint = suggestion(name, recipe_names())
        message = f"is neither a file nor a recipe.{hint} Recipes: {', '.join(recipe_names()) or 'none'}."
        layers.problems.append(Problem(name, "", message))
        return
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        layers.problems.append(Problem(name, "", f"is not TOML: {error}."))
        return
    layers.files.append(path)
    layers.merge(table, name)


def _is_in_plugin(override: tuple[KeyPath, str, str | None]) -> bool:
    path = override[0]
    return any(is_plugin(type_at(Config, path[:end])) for end in range(1, len(path)))


def _means_none(value: Any, path: KeyPath) -> bool:
    """TOML has no null: the text "none" is one, for keys that may be absent."""
    annotation = type_at(Config, path)
    return value == "none" and annotation is not None and type(None) in options(annotation)


def _plain(value: Any) -> str:
    return repr(list(value) if isinstance(value, tuple) else value)
