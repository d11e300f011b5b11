"""The ledger of a run: what became of every group, episode and attempt."""

from .adopt import adopt_spooled
from .errors import LedgerError
from .overview import overview, query, table, to_json, to_text
from .queries import trained_over_the_run
from .records import Limits, OpenGroup, PendingRetry
from .schema import reading
from .story import why
from .versions import effective_version, effective_versions
from .writer import LEDGER, Ledger

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
