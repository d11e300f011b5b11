#!/usr/bin/env python3
"""Measure the size and shape of every package: `make house` prints one table, now beside the start of the rebuilding.

A mirror and not a gate: it fails nothing. Figures without a package are those of the whole product without weightsync.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grimp

PACKAGES = ["tito", "rollout", "envs", "train", "quant", "core", "weightsync"]
MOST_LINES = 400
START = {  # tito, rollout, envs, train, quant, core, weightsync, all without weightsync
    "lines": [10440, 5296, 2212, 3747, 4217, 16719, 13739, 42631],
    "files": [76, 41, 23, 37, 45, 144, 95, 366],
    "largest file": [418, 491, 234, 348, 237, 490, 507, 491],
    "longest function": [65, 64, 37, 52, 41, 69, 51, 69],
    "class names met twice": [2, 6, 2, 4, 2, 16, 8, 18],
    "group_size: int": [0, 7, 0, 0, 0, 12, 0, 19],
    "import-string loaders": [0, 1, 0, 1, 0, 1, 1, 3],
    "import circles": [1, 0, 0, 0, 1, 1, 0, 3],
    "files over 400 lines": [1, 2, 0, 0, 0, 1, 2, 4],
}
"""Every figure, as this script measured it at the start."""


@dataclass
class Measured:
    """What one package, or all together, come to; each place is `file:line`."""

    lines: int = 0
    files: int = 0
    largest: tuple[int, str] = (0, "")
    longest: tuple[int, str] = (0, "")
    group_sizes: list[str] = field(default_factory=list)
    loaders: list[str] = field(default_factory=list)
    too_long: list[str] = field(default_factory=list)
    circles: list[list[str]] = field(default_factory=list)
    classes: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    def add(self, other: Measured) -> None:
        self.lines += other.lines
        self.files += other.files
        self.largest, self.longest = max(self.largest, other.largest), max(self.longest, other.longest)
        for name in ("group_sizes", "loaders", "too_long", "circles"):
            getattr(self, name).extend(getattr(other, name))
        for name, places in other.classes.items():
            self.classes[name] += places

    def figures(self, everywhere: dict[str, list[str]]) -> list[int]:
        twice = sum(len(everywhere[name]) > 1 for name in self.classes)
        lists = [self.group_sizes, self.loaders, self.circles, self.too_long]
        return [self.lines, self.files, self.largest[0], self.longest[0], twice, *map(len, lists)]


def measure(source: Path, package: str) -> Measured:
    """Read every module of `source/package`."""
    found = Measured(circles=circles(package))
    for path in sorted((source / package).rglob("*.py")):
        text, name = path.read_text(), str(path.relative_to(source))
        lines = text.count("\n")
        file = Measured(lines=lines, files=1, largest=(lines, name))
        if lines > MOST_LINES:
            file.too_long.append(f"{name} ({lines})")
        for node, function in _walk(ast.parse(text), function=None):
            place = f"{name}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.ClassDef):
                file.classes[node.name].append(place)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or 0) - node.lineno + 1
                file.longest = max(file.longest, (length, f"{place} {node.name}"))
            elif isinstance(node, ast.arg | ast.AnnAssign) and _says_group_size(node):
                file.group_sizes.append(place)
            elif function and _loads_a_name(node, function):
                file.loaders.append(f"{place} {function.name}")
        found.add(file)
    return found


def circles(package: str) -> list[list[str]]:
    """Sets of modules that import one another, inside functions too; imports for a type checker alone do not count."""
    graph = grimp.build_graph(package, exclude_type_checking_imports=True, cache_dir=None)
    reached = {module: graph.find_upstream_modules(module) for module in graph.modules}
    knots = {frozenset({m, *(n for n in above if m in reached[n])}) for m, above in reached.items()}
    return sorted(sorted(knot) for knot in knots if len(knot) > 1)


Function = ast.FunctionDef | ast.AsyncFunctionDef


def _walk(node: ast.AST, *, function: Function | None) -> Iterator[tuple[ast.AST, Function | None]]:
    """Every node below, with the function that it stands in."""
    for child in ast.iter_child_nodes(node):
        yield child, function
        yield from _walk(child, function=child if isinstance(child, Function) else function)


def _says_group_size(node: ast.arg | ast.AnnAssign) -> bool:
    name = node.arg if isinstance(node, ast.arg) else getattr(node.target, "id", "")
    return name == "group_size" and isinstance(node.annotation, ast.Name) and node.annotation.id == "int"


def _loads_a_name(node: ast.AST, function: Function) -> bool:
    """Whether `import_module` is called with a computed name in a function that looks up a computed attribute too."""
    if not _calls(node, "import_module") or function.name == "__getattr__":
        return False
    return any(_calls(n, "getattr", "attrgetter") for n in ast.walk(function))


def _calls(node: ast.AST, *names: str) -> bool:
    """Whether one of the functions `names` is called with a first or second argument that is no literal."""
    if not isinstance(node, ast.Call) or getattr(node.func, "id", getattr(node.func, "attr", "")) not in names:
        return False
    return bool(node.args) and not isinstance(node.args[:2][-1], ast.Constant)


def main(root: Path) -> None:
    sources = {name: root / "packages" / f"miles-{name}" / "src" for name in PACKAGES}
    sys.path[:0] = map(str, sources.values())
    packages = {name: measure(source, f"miles_{name}") for name, source in sources.items()}
    total = Measured()
    for name in PACKAGES:
        if name != "weightsync":
            total.add(packages[name])
    everywhere = packages["weightsync"].classes
    table = [p.figures(total.classes if n != "weightsync" else everywhere) for n, p in packages.items()]
    table.append(total.figures(total.classes))

    print("now/start".ljust(22), *(name.rjust(13) for name in [*PACKAGES, "all but wsync"]))
    for number, (figure, starts) in enumerate(START.items()):
        cells = [f"{column[number]}/{start}" for column, start in zip(table, starts, strict=True)]
        print(figure.ljust(22), *(cell.rjust(13) for cell in cells))
    print(f"\nlargest file      {total.largest[1]}\nlongest function  {total.longest[1]}")
    twice = [f"{name}: {', '.join(places)}" for name, places in sorted(total.classes.items()) if len(places) > 1]
    knots = [" <-> ".join(knot) for knot in total.circles]
    lists = [twice, total.group_sizes, total.loaders, knots, total.too_long]
    for figure, places in zip(list(START)[4:], lists, strict=True):
        print(f"\n{figure} ({len(places)})", *places, sep="\n  ")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1]))
