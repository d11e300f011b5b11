"""The format that a name stands for."""

from __future__ import annotations

from functools import lru_cache

from .fp8 import Fp8Format
from .int4 import Int4Format
from .mx import MxFormat
from .names import parse_name
from .nvfp4 import Nvfp4Format
from .spec import Format


@lru_cache(maxsize=256)
def get_format(name: str) -> Format:
    """The format of a full or short name, e.g. `mxfp8/rceil` or `mxfp8`.

    Raises:
        QuantError: no format has this name.
    """
    parsed = parse_name(name)
    match parsed.family:
        case "fp8":
            return Fp8Format(parsed)
        case "nvfp4":
            return Nvfp4Format(parsed)
        case "int4":
            return Int4Format(parsed)
        case _:
            return MxFormat(parsed)
