"""Why a part ended is told in one line, whatever Ray wrapped around it."""

from __future__ import annotations

from typing import Any

import pytest
from miles_core.cluster.respawn import ended
from miles_rollout.engines import EngineDied
from ray.exceptions import RayActorError, RayTaskError


async def call(result: str | Exception | None) -> Any:
    if isinstance(result, Exception):
        raise result
    return result


DIED = EngineDied("The engine exited with status 137.\nThe last lines of its log:\nfirst\nlast")


@pytest.mark.parametrize(
    ("result", "why"),
    [
        (None, "it was stopped"),
        ("it exited with status 137", "it exited with status 137"),
        (RayActorError(), "its process died"),
        (DIED, "The engine exited with status 137."),
        (
            RayTaskError("watch", "a long traceback", DIED).as_instanceof_cause(),
            "The engine exited with status 137.",
        ),
    ],
)
async def test_the_end_of_a_part_is_one_line(result: Any, why: str):
    assert await ended(call(result)) == why
