"""The page around the sections, and how it reaches the disk."""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
from collections.abc import Iterable
from pathlib import Path

from .text import safe


def page(title: str, body: Iterable[str]) -> str:
    """A whole page: no request leaves it, and its policy forbids every script but its own."""
    style, script = _asset("style.css"), _asset("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{safe(title)} · Miles</title><style>{style}</style></head>"
        f'<body><main>{"".join(body)}</main><div id="tip" role="status"></div><script>{script}</script></body></html>\n'
    )


def save(path: Path, html: str) -> Path:
    """Write the page whole: a reader sees the old one or the new one."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(html, encoding="utf-8")
    return partial.replace(path)


def _asset(name: str) -> str:
    return importlib.resources.files("miles_core.report").joinpath(name).read_text(encoding="utf-8")
