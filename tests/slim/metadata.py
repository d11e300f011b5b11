"""What the built wheels say they need, followed through what is installed here."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Iterator
from email import message_from_bytes
from email.message import Message
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def find_wheel(wheels: Path, package: str) -> Path:
    (found,) = wheels.glob(f"{package.replace('-', '_')}-*.whl")
    return found


def wheel_metadata(wheels: Path, package: str) -> Message:
    with zipfile.ZipFile(find_wheel(wheels, package)) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        return message_from_bytes(archive.read(name))


def requirements(wheels: Path, package: str, extras: Iterable[str] = ()) -> Iterator[Requirement]:
    """The direct requirements of `package` with `extras`, from its wheel or from the environment of the tests."""
    if canonicalize_name(package).startswith("miles"):
        lines = wheel_metadata(wheels, package).get_all("Requires-Dist") or []
    else:
        lines = distribution(package).requires or []
    for line in lines:
        requirement = Requirement(line)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield requirement


def closure(wheels: Path, package: str, extras: Iterable[str] = (), *, stop: frozenset[str] = frozenset()) -> set[str]:
    """Every distribution that installing `package[extras]` brings; what is behind `stop` is not followed."""
    found: set[str] = set()
    open_: list[tuple[str, frozenset[str]]] = [(package, frozenset(extras))]
    seen: set[tuple[str, frozenset[str]]] = set()
    while open_:
        item = open_.pop()
        if item in seen or item[0] in stop:
            continue
        seen.add(item)
        for requirement in requirements(wheels, *item):
            name = canonicalize_name(requirement.name)
            found.add(name)
            open_.append((name, frozenset(requirement.extras)))
    return found - {package}
