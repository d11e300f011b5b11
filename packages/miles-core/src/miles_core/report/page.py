"""Fills `page.html.j2`: one file that loads nothing, and that no text of a model, user or file can break out of."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from miles_core.text import format_seconds, visible

_FOLDER = Path(__file__).parent
_UNSAFE = "<>&\u2028\u2029"
"""What could end the element that the JSON stands in."""


def render(kind: str, *, title: str, data: Mapping[str, Any], **values: Any) -> str:
    """A page of the kind `run` or `comparison`: the script draws `data`, the template shows `values`.

    Its policy forbids every request, and every script but its own.
    """
    style, script = ((_FOLDER / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    known = {"kind": kind, "title": title, "digest": digest, "style": style, "script": script, "data": embedded(data)}
    return _template().render(**known, **values)


def embedded(data: Any) -> str:
    """JSON that may stand inside a `script` element."""
    text = json.dumps(_plain(data), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in _UNSAFE:
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def format_number(value: float) -> str:
    """Short and readable: 0.53, 41.2, 1.2k, 3.4M, 3.1e-6. The script's `short` does the same."""
    if not math.isfinite(value):
        return "\N{EN DASH}"
    size = abs(value)
    if size == 0:
        return "0"
    if size < 1e-3 or size >= 1e9:
        mantissa, exponent = f"{value:.1e}".split("e")
        return f"{mantissa.removesuffix('.0')}e{int(exponent)}"
    unit, letter = (1e6, "M") if size >= 1e6 else (1e3, "k") if size >= 1e4 else (1.0, "")
    text = f"{value / unit:.{4 if 1000 <= size < 1e4 else 3}g}"
    return (f"{value / unit:.0f}" if "e" in text else text) + letter


def percent(share: float) -> str:
    """`0 %`, `<0.1 %`, `3.1 %`, `97 %`."""
    value = 100 * share
    if value == 0 or value >= 10:
        return f"{value:.0f} %"
    return f"{value:.1f} %" if value >= 0.1 else "<0.1 %"


def count(number: float) -> str:
    """`12 345`, grouped with thin spaces."""
    return f"{number:,.0f}".replace(",", "\N{NARROW NO-BREAK SPACE}")


def plural(number: int, one: str) -> str:
    """`1 group`, `2 groups`."""
    return f"{count(number)} {one if number == 1 else one + 's'}"


def clock(seconds: float) -> str:
    """`0:04:12`, `2 d 3:04:12`."""
    days, rest = divmod(max(round(seconds), 0), 86400)
    text = f"{rest // 3600}:{rest // 60 % 60:02d}:{rest % 60:02d}"
    return f"{days} d {text}" if days else text


@cache
def _template() -> Any:
    options = {"autoescape": True, "undefined": StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    environment = Environment(loader=FileSystemLoader(_FOLDER), finalize=_shown, **options)
    environment.filters |= {
        **{function.__name__: function for function in (clock, count, percent, plural)},
        "seconds": format_seconds,
        "number": format_number,
        "share": "{:.0%}".format,
        "indented": lambda content: json.dumps(content, indent=2),
        "utc": lambda at: time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(at)),
    }
    return environment.get_template("page.html.j2")


def _shown(value: Any) -> Any:
    """The one door through which text reaches the page: nothing in it is hidden or reordered. The template escapes."""
    is_text = isinstance(value, str) and not hasattr(value, "__html__")
    return visible(value) if is_text and not value.isprintable() else value


def _plain(value: Any) -> Any:
    """What JSON can say: numbers of six digits, null for what is not finite, text that hides nothing."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {_shown(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return _shown(value)
