"""Compiles the CPU kernels when the package is built or installed; without a compiler it installs without them.

An editable install compiles into the source folder. A wheel carries the library and the tag of its platform.
"""

from __future__ import annotations

import runpy
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_NATIVE = "src/miles_weightsync/native"


class NativeBuildHook(BuildHookInterface[Any]):
    """`[tool.hatch.build.targets.wheel.hooks.custom]`."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        folder = Path(self.root) / _NATIVE
        build = runpy.run_path(str(folder / "build.py"))  # by its path: the package is not installed yet
        try:
            library: Path = build["build_library"](folder)
        except RuntimeError as error:
            self.app.display_warning(f"miles-weightsync: installing without its CPU kernels: {error}")
            return
        if version == "editable":
            return
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["artifacts"].append(f"{_NATIVE}/{library.name}")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"
