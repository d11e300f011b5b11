"""Fills pages with what the code knows, when the site is built: the configuration reference, the metric catalogue."""

from __future__ import annotations

from collections.abc import Callable


def on_page_markdown(markdown: str, **_: object) -> str:
    """Replace each `<!-- generated: NAME -->` by what NAME generates."""
    for name, generate in _GENERATED.items():
        marker = f"<!-- generated: {name} -->"
        if marker in markdown:
            markdown = markdown.replace(marker, generate())
    return markdown


def _configuration() -> str:
    from miles_core.config import reference

    return reference()


def _metrics() -> str:
    from miles_core.monitor.names import markdown_table

    return markdown_table()


_GENERATED: dict[str, Callable[[], str]] = {"configuration": _configuration, "metrics": _metrics}
