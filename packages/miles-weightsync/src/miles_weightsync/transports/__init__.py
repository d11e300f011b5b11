"""Ways to bring bytes into the memory of a receiver, all behind one interface."""

from __future__ import annotations

from .base import TRANSPORTS, Inbox, Outbox, Region, Ticket, make_inbox, make_outbox

__all__ = ["TRANSPORTS", "Inbox", "Outbox", "Region", "Ticket", "make_inbox", "make_outbox"]
