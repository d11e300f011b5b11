"""What can go wrong with a ledger."""

from __future__ import annotations

from miles_tito.errors import MilesError


class LedgerError(MilesError, RuntimeError):
    """The ledger cannot be opened or written, or an event contradicts what it holds. The run can be resumed."""
