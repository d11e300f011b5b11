"""Groups in Ray's object store die with the worker that put them there; training reads them from the spool then."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from miles_core.durable.spool import GroupHandle, SpoolWriter, fetch_groups
from miles_tito.records import Episode, Group, Outcome, Trajectory, VersionSpan
from ray import cloudpickle
from ray.exceptions import ObjectLostError, RayActorError


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(num_cpus=1, include_dashboard=False, _node_ip_address="127.0.0.1", log_to_driver=False)
    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # its processes cannot import a test
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    ray.shutdown()


def make_group(name: str, length: int) -> Group:
    tokens = np.arange(length, dtype=np.int32)
    trajectory = Trajectory(
        id=f"{name}-0.0:0",
        tokens=tokens,
        loss_mask=tokens > 1,
        logprobs=np.where(tokens > 1, -0.5, 0).astype(np.float32),
        versions=(VersionSpan(start=2, end=length, version=0),),
    )
    episode = Episode(
        id=f"{name}/0", prompt_id="p", group_id=name, outcome=Outcome.GRADED, reward=1.0, trajectories=(trajectory,)
    )
    return Group(id=name, prompt_id="p", episodes=(episode,))


class Owner:
    def put(self, name: str, length: int, directory: Path) -> GroupHandle:
        """As a worker does: on disk, then in the object store, which it owns."""
        group = make_group(name, length)
        writer = SpoolWriter(directory, name)
        address = writer.append(group)
        writer.close()
        return GroupHandle(ref=ray.put(group), address=address, directory=directory)

    def die(self) -> None:
        os._exit(9)


class Reader:
    def tokens(self, handles: list[GroupHandle]) -> list[int]:
        groups = fetch_groups(handles, get=ray.get, lost=(ObjectLostError,))
        return [len(group.episodes[0].trajectories[0].tokens) for group in groups]


def started(kind: type) -> Any:
    """An actor around a plain class."""
    remote: Any = ray.remote(kind)
    return remote.options(num_cpus=0).remote()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_group_outlives_the_worker_that_made_it(cluster: None, tmp_path: Path) -> None:
    mortal, other = started(Owner), started(Owner)
    handles = [
        ray.get(mortal.put.remote("small", 10, tmp_path)),
        ray.get(mortal.put.remote("large", 200_000, tmp_path)),  # in shared memory, the small one in the owner's
        ray.get(other.put.remote("kept", 12, tmp_path)),
    ]
    reader = started(Reader)
    assert ray.get(reader.tokens.remote(handles)) == [10, 200_000, 12]
    with pytest.raises(RayActorError):
        ray.get(mortal.die.remote())
    assert ray.get(reader.tokens.remote(handles), timeout=60) == [10, 200_000, 12]
    late = started(Reader)
    assert ray.get(late.tokens.remote(handles), timeout=60) == [10, 200_000, 12]
