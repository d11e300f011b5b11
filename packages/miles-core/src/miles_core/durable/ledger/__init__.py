"""The ledger of a run: what became of every group, episode and attempt."""

from miles_core.text import table

from .history import why
from .overview import overview, query, to_json, to_text
from .queries import (
    Limits,
    OpenGroup,
    PendingRetry,
    effective_version,
    effective_versions,
    trained_over_the_run,
)
from .schema import LedgerError, reading
from .writer import LEDGER, Ledger

adopt_spooled = Ledger.recover_spooled
"""The name that `Ledger.recover_spooled` had before."""

__all__ = [
    "LEDGER",
    "Ledger",
    "LedgerError",
    "Limits",
    "OpenGroup",
    "PendingRetry",
    "adopt_spooled",
    "effective_version",
    "effective_versions",
    "overview",
    "query",
    "reading",
    "table",
    "to_json",
    "to_text",
    "trained_over_the_run",
    "why",
]
