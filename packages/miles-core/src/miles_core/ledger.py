"""`miles_core.durable.ledger` under the name that it had in 0.1."""

from miles_core.durable.ledger import *  # noqa: F403  # pyright: ignore[reportWildcardImportFromLibrary]
from miles_core.durable.ledger import __all__ as __all__
