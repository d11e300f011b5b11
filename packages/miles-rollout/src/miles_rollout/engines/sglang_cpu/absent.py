"""Stand-ins for packages that SGLang imports at module level and never uses when it serves text on a CPU.

`import triton.language as tl` and `@triton.jit` have to work for the modules to load; the kernels under them are only
ever launched on a GPU. A package that is installed is left alone.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

ABSENT = ("triton", "torchvision")

HIDDEN = ("megatron",)
"""Imported by a debugging aid of SGLang wherever it is installed, for 1.5 s of every start; it answers ImportError."""


def install() -> None:
    """Serve the absent packages from stand-ins, from now on in this process. Idempotent."""
    for name in HIDDEN:
        sys.modules.setdefault(name, None)  # pyright: ignore[reportArgumentType]  (None: importing it raises)
    roots = frozenset(name for name in ABSENT if importlib.util.find_spec(name) is None)
    if not roots or any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    # These two ask whether the packages are there and keep the answer. It has to be "no", so they ask first.
    importlib.import_module("torch._dynamo")
    importlib.import_module("transformers.utils.import_utils").is_torchvision_available()
    sys.meta_path.insert(0, _Finder(roots))
    if "triton" in roots:
        _complete_triton(importlib.import_module("triton"), importlib.import_module("triton.language"))


class Stand(ModuleType):
    """A package in which every name exists: CamelCase names are classes, others are packages that can be called."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name[0].isupper():
            value = type(name, (_AnyClass,), {"__module__": self.__name__})
        else:
            value = importlib.import_module(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As a decorator, with or without arguments, leave the function as it is."""
        if len(args) == 1 and callable(args[0]) and not kwargs:
            return args[0]
        return _unchanged


class _AnyClass:
    """Can be subclassed, and built from anything."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        del args, kwargs


class _Constexpr:
    """`triton.language.constexpr`: an annotation, and a box around module-level constants."""

    def __init__(self, value: Any = None) -> None:
        self.value = value


class _Finder:
    """Finds every module below the roots."""

    def __init__(self, roots: frozenset[str]) -> None:
        self.roots = roots

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in self.roots:
            return None
        return importlib.machinery.ModuleSpec(name, _Loader(), is_package=True)


class _Loader(importlib.abc.Loader):
    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return Stand(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run: the names appear when they are asked for."""


def _complete_triton(triton: Any, language: Any) -> None:
    """What is computed with on the host, at import or beside a kernel launch."""
    triton.__version__ = "3.0.0"
    triton.cdiv = _ceil_div
    triton.next_power_of_2 = _next_power_of_2
    language.constexpr = _Constexpr


def _ceil_div(a: int, b: int) -> int:
    return -(a // -b)


def _next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length() if n > 0 else 1


def _unchanged(function: Callable[..., Any]) -> Callable[..., Any]:
    return function
