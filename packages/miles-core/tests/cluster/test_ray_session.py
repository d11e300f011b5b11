"""Ray that does not come up is tried once more, and then told with what its own processes wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ray
from miles_core.cluster.ray_session import LAST_LINES, RayStartError, cluster
from miles_core.config import RayConfig


class Starts:
    """Stands for `ray.init`: raises the given errors, then starts."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.count = 0

    def __call__(self, **_: Any) -> None:
        self.count += 1
        if self.errors:
            raise self.errors.pop(0)


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(*errors: Exception) -> Starts:
        starts = Starts(*errors)
        monkeypatch.setattr(ray, "init", starts)
        monkeypatch.setattr(ray, "shutdown", lambda: None)
        return starts

    return make


async def up() -> None:
    async with cluster(RayConfig()):
        pass


async def test_a_late_part_of_ray_is_waited_for_once_more(start: Any) -> None:
    starts = start(RuntimeError("Timed out waiting for file /tmp/none/session_1/gcs_server_port_f"))
    await up()
    assert starts.count == 2


async def test_a_bare_exception_of_a_late_raylet_counts_too(start: Any) -> None:
    starts = start(Exception("The current node timed out during startup."))
    await up()
    assert starts.count == 2


async def test_another_error_is_not_tried_again(start: Any) -> None:
    starts = start(RuntimeError("no such address"))
    with pytest.raises(RuntimeError, match="no such address"):
        await up()
    assert starts.count == 1


async def test_a_second_failure_shows_the_end_of_what_rays_processes_wrote(start: Any, tmp_path: Path) -> None:
    logs = tmp_path / "session_2026-01-01" / "logs"
    logs.mkdir(parents=True)
    (logs / "gcs_server.out").write_text("\n".join(f"line {n}" for n in range(100)))
    (logs / "raylet.err").write_text("no space left\n")
    (logs / "gcs_server.err").write_text("")
    late = f"Timed out waiting for file {logs.parent}/gcs_server_port_f"
    start(RuntimeError(late), RuntimeError(late))
    with pytest.raises(RayStartError, match="line 99") as caught:
        await up()
    told = str(caught.value)
    assert "no space left" in told
    assert f"line {100 - LAST_LINES}" in told
    assert f"line {100 - LAST_LINES - 1}" not in told
    assert "gcs_server.err" not in told


async def test_processes_of_ray_that_wrote_nothing_are_told_too(start: Any, tmp_path: Path) -> None:
    late = f"Timed out waiting for file {tmp_path}/session_2026-01-01/gcs_server_port_f"
    start(RuntimeError(late), RuntimeError(late))
    with pytest.raises(RayStartError, match=f"wrote anything into {tmp_path}/session_2026-01-01/logs"):
        await up()
