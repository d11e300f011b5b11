"""Tests of transports that need a package of their own."""

from __future__ import annotations

import pytest
from miles_weightsync.errors import MissingDependency
from miles_weightsync.transports import make_inbox


def skip_unless_installed(transport: str) -> None:
    """Skip a test whose transport needs a package that is not here; the reason says which."""
    try:
        make_inbox(transport).close()
    except MissingDependency as missing:
        pytest.skip(str(missing))
