"""Keys that have another name or place than in an earlier release.

From a user the old name is an error that says the new one. What a run directory has kept is read as it was meant.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from .keys import KIND, KeyPath, fields, leaves, unions
from .layers import get, put
from .schema import Config

MOVED: Mapping[str, str] = {
    "train.layout": "train.fsdp.layout",
    "train.activation_checkpointing": "train.fsdp.activation_checkpointing",
    "train.reshard_after_forward": "train.fsdp.reshard_after_forward",
}
"""Old name -> new name, of keys and of whole tables."""


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


def _plain(value: Any) -> str:
    return repr(list(value) if isinstance(value, tuple) else value)
