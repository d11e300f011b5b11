"""Addresses of engines: what a user may write, and whether two of them are the same engine."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

from .engine import is_local
from .errors import PushConfigError

_PORTS = {"http": 80, "https": 443}


def engine_urls(engines: Sequence[str]) -> tuple[str, ...]:
    """The base URLs as they are used.

    Raises:
        PushConfigError: there is none, one is no URL of a server, or two are the same.
    """
    urls = tuple(url.rstrip("/") for url in engines)
    places = [_place(url) for url in urls]
    if not urls or len(set(places)) != len(urls):
        raise PushConfigError(f"`engines` must name at least one URL and none twice; got {list(engines)}.")
    return urls


def server(url: str) -> str:
    """Equal for two addresses of one server, as far as this host can tell: its own addresses are one."""
    host, port, path = _place(url)
    return f"{'this host' if is_local(url) else host}:{port}{path}"


def _place(url: str) -> tuple[str, int, str]:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port or _PORTS.get(parts.scheme)
    except ValueError as error:  # a port that is none
        raise PushConfigError(f"{url!r} is not the address of an engine: {error}.") from error
    if not host or parts.scheme not in _PORTS or parts.query or parts.fragment:
        raise PushConfigError(f"{url!r} is not the address of an engine; it looks like http://127.0.0.1:30000.")
    assert port is not None, "both schemes have one"
    return "127.0.0.1" if host == "localhost" else host, port, parts.path
