"""One line for each group that reached its end, with the place of its record."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from core_records import make_group
from miles_core.fate_index import FateIndex
from miles_core.spool import SpoolAddress, SpoolWriter, read_group
from miles_rollout.buffer import GroupBuffer
from miles_rollout.config import RolloutConfig
from miles_tito.records import Prompt
from miles_tito.summary import GroupRef, summarize


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "index.jsonl").read_text().splitlines()]


def config() -> RolloutConfig:
    return RolloutConfig(group_size=2, groups_per_step=1, max_staleness=1)


async def issue(buffer: GroupBuffer, name: str) -> None:
    await buffer.acquire()
    buffer.issue(name, Prompt(id=f"p-{name}"))


def spooled(writer: SpoolWriter, name: str, rewards: tuple[float, float]) -> GroupRef:
    group = make_group(name, [[4], [4]], rewards)
    address = writer.append(group)
    return replace(summarize(group), metadata={"spool": (address.file, address.offset)})


async def test_a_line_leads_from_a_fate_to_the_groups_record(tmp_path: Path) -> None:
    index, writer = FateIndex(tmp_path), SpoolWriter(tmp_path, "worker-0")
    buffer = GroupBuffer(config(), observer=index)
    for name, rewards in (("g0", (1.0, 1.0)), ("g1", (0.0, 1.0))):
        await issue(buffer, name)
        ref = spooled(writer, name, rewards)
        await index.spooled(ref)
        buffer.put(ref)
    assert [line["fate"] for line in lines(tmp_path)] == ["filtered"], "the other is open, so it has no line yet"
    batch = await buffer.take()
    buffer.set_version(1)
    buffer.release(batch)
    index.close()
    filtered, trained = lines(tmp_path)
    assert (filtered["group"], filtered["prompt"], filtered["rewards"]) == ("g0", "p-g0", [1.0, 1.0])
    assert filtered["reason"]
    assert (trained["fate"], trained["version"], trained["rewards"]) == ("trained", 1, [0.0, 1.0])
    file, offset = trained["spool"]
    assert read_group(tmp_path, SpoolAddress(file=file, offset=offset)).id == "g1"


async def test_a_group_that_never_finished_has_a_line_without_a_record(tmp_path: Path) -> None:
    index = FateIndex(tmp_path)
    buffer = GroupBuffer(config(), observer=index)
    await issue(buffer, "g0")
    buffer.close()
    index.close()
    (line,) = lines(tmp_path)
    assert (line["fate"], line["reason"], line["rewards"], line["spool"]) == ("aborted", "run ended", None, None)


async def test_a_retry_names_the_group_that_it_repeats(tmp_path: Path) -> None:
    index = FateIndex(tmp_path)
    buffer = GroupBuffer(config(), observer=index)
    await buffer.acquire()
    buffer.issue("g7", Prompt(id="p"), retry_of="g3")
    buffer.close()
    index.close()
    assert lines(tmp_path)[0]["retry_of"] == "g3"
