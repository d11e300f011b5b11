"""A setting that is accepted and ignored is a lie: every key is read by some code other than its own checks."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import miles_core
import pytest
from miles_core.config.keys import leaves
from miles_core.config.schema import Config

PACKAGES = Path(miles_core.__file__).parents[3]
DESCRIBE = ("miles_core/config/", "miles_core/doctor/", "miles_core/run/dry_run.py")
"""Code that only checks or describes a setting does not make it do anything."""


def attributes_read(tree: ast.AST) -> Iterator[str]:
    """Names of attributes read in `tree`, outside the functions that only check them."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef) and (node.name == "__post_init__" or node.name.startswith("_check")):
            continue
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            yield node.attr
        yield from attributes_read(node)


def test_checks_and_writes_do_not_count_as_reading():
    tree = ast.parse("class C:\n def __post_init__(self):\n  self.a\n def go(self):\n  self.b = self.c.d\n")
    assert set(attributes_read(tree)) == {"c", "d"}


READERS = {
    "rollout": ("rollout", "tito"),
    "engines": ("rollout",),
    "eval": ("rollout", "tito"),
    "train": ("train",),
    "sft": ("train",),
    "sync": ("weightsync",),
    "quant": ("quant",),
}
"""The packages beside core whose business a section is: a name that others happen to read says nothing."""


def test_every_key_is_read_by_the_packages_that_it_is_for():
    if not (PACKAGES / "miles-train").is_dir():
        pytest.skip("needs the sources of all packages")
    read: dict[str, set[str]] = {}
    for file in PACKAGES.glob("miles-*/src/**/*.py"):
        if any(part in file.as_posix() for part in DESCRIBE):
            continue
        package = file.relative_to(PACKAGES).parts[0].removeprefix("miles-")
        read.setdefault(package, set()).update(attributes_read(ast.parse(file.read_text(encoding="utf-8"))))
    ignored = [
        str(key)
        for key in leaves(Config)
        if not any(key.path[-1] in read[package] for package in ("core", *READERS.get(key.path[0], ())))
    ]
    assert not ignored, f"accepted and ignored: {', '.join(ignored)}"
