#!/usr/bin/env python3
"""Write one version into every package, its siblings' pins, and CITATION.cff: `scripts/version.py 0.2.0`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def main(version: str) -> None:
    if not re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", version):
        sys.exit(f"{version!r} is not a version like 0.2.0 or 0.2.0rc1.")
    for path in (ROOT / "pyproject.toml", *ROOT.glob("packages/*/pyproject.toml")):
        text = re.sub(r'(?m)^version = "[^"]*"', f'version = "{version}"', path.read_text(), count=1)
        path.write_text(re.sub(r'("miles-[a-z]+(\[[a-z0-9,-]+\])?==)[^"]+"', rf'\g<1>{version}"', text))
    citation = ROOT / "CITATION.cff"
    citation.write_text(re.sub(r"(?m)^version: .*", f"version: {version}", citation.read_text()))
    print(f"{version} everywhere; now run `make lock` and move the heading of CHANGELOG.md.")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
