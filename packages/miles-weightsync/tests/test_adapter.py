"""LoRA adapters alone: versions beside one another, none half loaded, old ones unloaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from miles_weightsync import PushConfig, ShardError, SyncError
from miles_weightsync.push import Pusher
from weightsync_fakes import FakeEngine, shards, unpack

_PREFIX = "base_model.model.model.layers.0.self_attn.q_proj"
NAMES = {f"{_PREFIX}.lora_A.weight": (4, 8), f"{_PREFIX}.lora_B.weight": (8, 4)}
CONFIG = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}


class LoraEngine(FakeEngine):
    """Keeps adapters as SGLang does: by name, tensors where they were found."""

    def __init__(self, **options: Any) -> None:
        self.adapters: dict[str, dict[str, torch.Tensor]] = {}
        self.stuck = ""
        super().__init__(**options)

    def do_server_info(self, body: dict[str, Any]) -> tuple[int, Any]:
        return 200, super().do_server_info(body)[1] | {"enable_lora": True}

    def do_load_lora_adapter_from_tensors(self, body: dict[str, Any]) -> tuple[int, Any]:
        if body["lora_name"] in self.adapters:
            return 400, {"success": False, "error_message": "already loaded"}
        assert body["config_dict"] == CONFIG
        assert body["load_format"] == "flattened_bucket"
        assert self.has_session == (self.tp > 1)  # its end waits for all ranks
        assert len(body["serialized_named_tensors"]) == self.tp
        for payload in body["serialized_named_tensors"]:
            self.adapters[body["lora_name"]] = dict(unpack(payload))
        return 200, {"success": True, "loaded_adapters": dict.fromkeys(self.adapters, "__tensor__")}

    def do_unload_lora_adapter(self, body: dict[str, Any]) -> tuple[int, Any]:
        if body["lora_name"] == self.stuck:
            return 400, {"success": False, "error_message": "in use"}
        if body["lora_name"] not in self.adapters:
            return 400, {"success": False, "error_message": f"LoRA with name {body['lora_name']} does not exist."}
        del self.adapters[body["lora_name"]]
        return 200, {"success": True}


@pytest.fixture
def lora() -> Iterator[Callable[..., LoraEngine]]:
    made: list[LoraEngine] = []

    def make(**options: Any) -> LoraEngine:
        made.append(LoraEngine(**options))
        return made[-1]

    yield make
    for engine in made:
        engine.adapters.clear()
        engine.stop()


def weights(version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {name: torch.randn(shape, generator=generator) for name, shape in NAMES.items()}


def push(pusher: Pusher, version: int) -> Any:
    return pusher.push_adapter(shards(weights(version)), name="policy", version=version, adapter_config=CONFIG)


def test_versions_lie_beside_one_another_and_the_one_before_the_last_is_unloaded(
    lora: Callable[..., LoraEngine],
) -> None:
    engine = lora(tp=2)
    with Pusher([engine.url], config=PushConfig(timeout_s=20)) as pusher:
        for version in (1, 2, 3):
            report = push(pusher, version)
            assert report.engines[0].serves == version
    assert sorted(engine.adapters) == ["policy@2", "policy@3"]
    for version in (2, 3):  # memory of its own: a later push changes no earlier version
        for name, tensor in weights(version).items():
            assert torch.equal(engine.adapters[f"policy@{version}"][name], tensor)
    assert "/pause_generation" not in engine.paths


def test_an_engine_that_fails_leaves_the_others_with_the_new_version_and_can_be_tried_again(
    lora: Callable[..., LoraEngine],
) -> None:
    good, bad = lora(), lora()
    with Pusher([good.url, bad.url], config=PushConfig(timeout_s=20)) as pusher:
        push(pusher, 1)
        bad.fail_at = len(bad.requests) + 2
        with pytest.raises(SyncError, match="scripted failure") as failure:
            push(pusher, 2)
        assert [outcome.ok for outcome in failure.value.engines] == [True, False]
        assert (sorted(good.adapters), sorted(bad.adapters)) == (["policy@1", "policy@2"], ["policy@1"])
        push(pusher, 2)
    assert sorted(good.adapters) == sorted(bad.adapters) == ["policy@1", "policy@2"]


def test_an_adapter_in_use_is_named_and_unloaded_later(lora: Callable[..., LoraEngine]) -> None:
    engine = lora()
    with Pusher([engine.url], config=PushConfig(timeout_s=20)) as pusher:
        push(pusher, 1)
        push(pusher, 2)
        engine.stuck = "policy@1"
        assert "policy@1 could not be unloaded" in str(push(pusher, 3).engines[0].reason)
        engine.stuck = ""
        assert push(pusher, 4).engines[0].reason is None
    assert sorted(engine.adapters) == ["policy@3", "policy@4"]


def test_an_engine_without_lora_is_told_what_is_missing(engine: FakeEngine) -> None:
    with (
        Pusher([engine.url], config=PushConfig(timeout_s=20)) as pusher,
        pytest.raises(SyncError, match="--enable-lora"),
    ):
        push(pusher, 1)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({f"{_PREFIX}.lora_B.weight": None}, r"lora_A\.weight` was given without .*lora_B\.weight`"),
        ({"odd.lora_B.weight": torch.ones(8, 4)}, r"`odd\.lora_B\.weight` was given without `odd\.lora_A\.weight`"),
        ({f"{_PREFIX}.lora_A.weight": torch.ones(3, 8)}, r"is \(3, 8\) and .* is \(8, 4\); lora_A is \(rank, inputs\)"),
        ({f"{_PREFIX}.lora_A.weight": torch.ones(4, 8, dtype=torch.int8)}, "is int8; the tensors of an adapter"),
    ],
)
def test_tensors_that_make_no_adapter_are_named_and_no_engine_is_asked(
    lora: Callable[..., LoraEngine], changed: dict[str, torch.Tensor | None], message: str
) -> None:
    engine = lora()
    tensors = {name: tensor for name, tensor in (weights(1) | changed).items() if tensor is not None}
    with Pusher([engine.url], config=PushConfig(timeout_s=20)) as pusher, pytest.raises(ShardError, match=message):
        pusher.push_adapter(shards(tensors), name="policy", version=1, adapter_config=CONFIG)
    assert engine.paths == []


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"name": ""}, "The adapter's name is ''"),
        ({"name": "a@1"}, "The adapter's name is 'a@1'"),
        ({"version": 1.5}, r"The version is 1\.5"),
        ({"adapter_config": {"lora_alpha": 1}}, "has no r, target_modules"),
        ({"adapter_config": CONFIG | {"target_modules": {"q_proj"}}}, "cannot be sent as JSON"),
    ],
)
def test_an_order_that_makes_no_sense_is_refused(
    lora: Callable[..., LoraEngine], changed: dict[str, Any], message: str
) -> None:
    engine = lora()
    order = {"name": "policy", "version": 1, "adapter_config": CONFIG} | changed
    with Pusher([engine.url], config=PushConfig(timeout_s=20)) as pusher, pytest.raises(SyncError, match=message):
        pusher.push_adapter(shards(weights(1)), **order)
    assert engine.paths == []


@pytest.mark.parametrize("restarts", ["engine", "trainer"])
def test_what_was_loaded_before_a_restart_stands_in_no_way(lora: Callable[..., LoraEngine], restarts: str) -> None:
    engine = lora()
    with Pusher([engine.url], config=PushConfig(timeout_s=20)) as pusher, ExitStack() as held:
        push(pusher, 1)
        push(pusher, 2)
        if restarts == "engine":
            engine.adapters.clear()
        else:
            pusher = held.enter_context(Pusher([engine.url], config=PushConfig(timeout_s=20)))
        for version in (2, 3, 4):
            assert push(pusher, version).engines[0].reason is None
    assert engine.adapters.keys() == {"policy@3", "policy@4"}
