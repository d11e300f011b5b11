"""A process that lives a run as fast as it can, and says after each flush what another one must find: `fate group`.

Usage: busy_writer.py LEDGER
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from ledger_life import event, make_ref
from miles_core.durable.ledger import Ledger, Limits, reading
from miles_rollout.fates import Fate


def say(what: str, name: str) -> None:
    print(what, name, flush=True)


async def live(ledger: Ledger, version: int) -> None:
    """Issue, finish, buffer, train; every third step commits."""
    buffered = [group.id for group in ledger.open_groups() if group.is_admitted]
    while True:
        name = f"g{ledger.next_group():06d}"
        ledger(event(name, Fate.IN_FLIGHT, version=version, drawn=ledger.drawn() + 1))
        await asyncio.sleep(0)
        say("issued", name)
        for group in ledger.open_groups():
            if not group.is_admitted:
                ledger.finished(make_ref(group.id, oldest=version, attempt=group.attempt))
                ledger(event(group.id, Fate.BUFFERED, version=version))
                buffered.append(group.id)
        await asyncio.sleep(0)
        say("buffered", name)
        if len(buffered) >= 2:
            version += 1
            for group_id in buffered:
                ledger(event(group_id, Fate.TRAINED, version=version))
            ledger.step(version, [make_ref(group_id) for group_id in buffered])
            buffered.clear()
            await asyncio.sleep(0)
            say("trained", name)
            if version % 3 == 0:
                ledger.commit(version, f"step-{version:06d}")
                say("committed", str(version))


if __name__ == "__main__":
    path = Path(sys.argv[1])
    committed = 0
    if path.exists():
        with reading(path) as db:
            newest = "SELECT max(version) FROM steps WHERE dropped_start IS NULL AND committed_at IS NOT NULL"
            committed = db.execute(newest).fetchone()[0] or 0
    ledger = Ledger.open(path, create=True)
    ledger.start(committed, limits=Limits(max_staleness=8, credits=None))
    asyncio.run(live(ledger, committed))
