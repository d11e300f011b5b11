"""Compiles the kernels beside this file: `python -m miles_quant.native.build`, or the build hook of the package.

Needs nothing but the standard library and a C++17 compiler, because it runs before the package is installed.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

SOURCES = ("vectors.h", "kernels.h", "kernels.cpp", "dispatch.cpp")
LIBRARY = "kernels.native"
"""A shared library; under the usual name Python would take it for a module of its own."""

_FLAGS = (
    *("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti"),
    "-ffp-contract=off",  # a fused multiply-add rounds once where the formats round twice
    *("-Wall", "-Wno-psabi", "-Wno-maybe-uninitialized"),
)
_X86 = {
    "portable": (),
    "avx2": ("-mavx2",),
    "avx512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"),
}


def sources_digest(folder: Path) -> str:
    """SHA-256 of the C++ sources in `folder`; a library carries that of its own, so that an outdated one is noticed."""
    known = hashlib.sha256()
    for name in SOURCES:
        known.update((folder / name).read_bytes())
    return known.hexdigest()


def build_library(folder: Path) -> Path:
    """Compile into `folder` unless the library there is of these sources already.

    Raises:
        RuntimeError: no compiler, or it failed; the message holds its last lines.
    """
    library, digest = folder / LIBRARY, sources_digest(folder)
    if library.exists() and digest.encode() in library.read_bytes():
        return library
    library.unlink(missing_ok=True)
    compiler = find_compiler()
    if compiler is None:
        raise RuntimeError("no C++ compiler was found (looked for $CXX, c++, g++, clang++)")
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    with tempfile.TemporaryDirectory(dir=folder, prefix=".build-") as scratch:
        objects = []
        for isa, flags in (_X86 if is_x86 else {"portable": ()}).items():
            objects.append(f"{scratch}/{isa}.o")
            isa_flags = (*flags, f"-DMQ_ISA=mq_{isa}")
            _run([compiler, *_FLAGS, *isa_flags, "-c", str(folder / "kernels.cpp"), "-o", objects[-1]])
        linked = f"{scratch}/{LIBRARY}"
        about = [f'-DMQ_SOURCES="{digest}"', *(["-DMQ_X86"] if is_x86 else [])]
        _run([compiler, *_FLAGS, *about, "-shared", str(folder / "dispatch.cpp"), *objects, "-o", linked])
        os.replace(linked, library)  # whole or not at all, whoever else builds
    return library


def find_compiler() -> str | None:
    """The C++ compiler of $CXX, or the first one on the path."""
    names = [os.environ.get("CXX") or "c++", "g++", "clang++"]
    return next((found for name in names if (found := shutil.which(name))), None)


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode != 0:
        tail = "\n".join(done.stderr.strip().splitlines()[-8:])
        raise RuntimeError(f"{command[0]} failed with status {done.returncode}:\n{tail}")


if __name__ == "__main__":
    try:
        print(build_library(Path(__file__).parent))
    except RuntimeError as error:
        sys.exit(f"the kernels were not built: {error}")
