"""Results that reached the spool but not the ledger, because the run stopped in between."""

from __future__ import annotations

import logging
from collections.abc import Container
from pathlib import Path

from miles_core.durable.spool import SpoolAddress, SpoolError, read_group, read_ids, spooled

from .writer import Ledger

logger = logging.getLogger(__name__)

SLACK_S = 3600.0
"""Clocks of a worker's file system and of the driver may differ by this."""


def adopt_spooled(ledger: Ledger, trajectories: Path) -> int:
    """Take what the spool holds of groups that the ledger still awaits; returns how many. Comes before `start`.

    Only files that were written since the oldest of them was issued are looked at. A damaged record is left out: its
    group runs again.
    """
    awaited = ledger.awaited()
    if not awaited:
        return 0
    since = min(awaited.values()) - SLACK_S
    adopted = 0
    for path in sorted(trajectories.glob("*.spool")):
        if path.stat().st_mtime >= since:
            adopted += _adopt_from(path, ledger, awaited.keys())
    return adopted


def _adopt_from(path: Path, ledger: Ledger, awaited: Container[str]) -> int:
    adopted = 0
    try:
        for group_id, address in read_ids(path):
            adopted += group_id in awaited and _adopt(path.parent, address, ledger)
    except SpoolError as error:
        logger.warning("what lies behind is left out, its groups run again: %s", error)
    return adopted


def _adopt(directory: Path, address: SpoolAddress, ledger: Ledger) -> bool:
    try:
        ref = spooled(read_group(directory, address), address, directory)
    except SpoolError as error:
        logger.warning("left out, its group runs again: %s", error)
        return False
    return ledger.adopt(ref)
