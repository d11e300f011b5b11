"""Staged pushes into real receivers around plain torch modules: whole versions only, whatever fails."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Literal

import pytest
import staged_bed
import torch
from installed import skip_unless_installed
from miles_weightsync import PushConfig, PushConfigError, ShardError, SyncError
from miles_weightsync.config import Pause
from miles_weightsync.planner import ModelShape
from miles_weightsync.push import Pusher
from miles_weightsync.transports import Region, Ticket
from miles_weightsync.transports.tcp import TcpOutbox
from staged_bed import EMBEDDING, BedEngine, checkpoint, digests, shards

Transport = Literal["shm", "tcp", "mooncake", "nixl"]
CONFIG = PushConfig(way="staged", bucket_bytes=4096, timeout_s=20)


def assert_serves(engine: BedEngine, version: int, *, steps: int = 0, stamp: int | None = None) -> None:
    found = engine.generate()
    assert found is not None, "the engine is paused"
    assert found["digests"] == digests(version, engine.tp, steps=steps)
    assert found["fresh"]
    assert found["version"] == str(version if stamp is None else stamp)


@pytest.mark.parametrize("transport", ["shm", "tcp", "mooncake", "nixl"])
@pytest.mark.parametrize("tp", [1, 2])
def test_a_full_push_then_a_delta_reach_every_rank_bit_for_bit(
    bed: Callable[..., BedEngine], tp: int, transport: Transport
) -> None:
    skip_unless_installed(transport)
    engine = bed(tp=tp)
    with Pusher([engine.url], config=replace(CONFIG, transport=transport)) as pusher:
        first = pusher.push(shards(checkpoint(1)), version=1)
        assert_serves(engine, 1)
        second = pusher.push(shards(checkpoint(1, steps=1)), version=2)
        assert_serves(engine, 1, steps=1, stamp=2)
    assert (first.engines[0].kind, first.engines[0].reason) == ("full", "nothing was pushed before")
    assert (second.engines[0].kind, second.engines[0].reason) == ("delta", None)
    assert second.bytes < first.bytes / 5
    assert second.engines[0].serves == 2
    assert [list(receiver._inboxes) for receiver in engine.receivers] == [[transport]] * tp


MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}
LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8,
    "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 16,
}  # fmt: skip
FAMILIES = {
    "Llama": {},
    "Qwen2": {"tie_word_embeddings": True},
    "Qwen3Moe": MOE,
    "Glm4Moe": MOE | {"n_shared_experts": 1, "first_k_dense_replace": 1, "use_qk_norm": True, "attention_bias": True},
    "DeepseekV3": LATENT,
}


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_arrives_bit_for_bit_and_as_a_delta_too(
    bed: Callable[..., BedEngine], monkeypatch: pytest.MonkeyPatch, family: str, tp: int
) -> None:
    config = staged_bed.CONFIG | {"architectures": [f"{family}ForCausalLM"]} | FAMILIES[family]
    monkeypatch.setattr(staged_bed, "CONFIG", config)
    monkeypatch.setattr(staged_bed, "SHAPE", ModelShape.from_hf(config))
    engine = bed(tp=tp)
    with Pusher([engine.url], config=CONFIG) as pusher:
        for version, steps in ((1, 0), (2, 1)):
            report = pusher.push(shards(checkpoint(1, steps=steps)), version=version)
            assert_serves(engine, 1, steps=steps, stamp=version)
        assert report.engines[0].kind == "delta"
        (found,) = pusher.verify(shards(checkpoint(1, steps=1))).values()
    assert found.is_equal
    assert not found.unused


def test_requests_run_until_the_short_commit(bed: Callable[..., BedEngine]) -> None:
    engine = bed()
    with Pusher([engine.url], config=CONFIG) as pusher:
        pusher.push(shards(checkpoint(1)), version=1)
        engine.requests.clear()
        pusher.push(shards(checkpoint(2)), version=2)
    expected = ["pause_generation", "flush_cache", "begin_weight_update", "update_weights_from_tensor"]
    expected += ["end_weight_update", "update_weight_version", "continue_generation"]
    assert engine.requests == [f"/{path}" for path in expected]


@pytest.mark.parametrize(("pause", "is_busy"), [("retract", False), ("abort", False), ("in_place", True)])
def test_the_pause_is_the_one_asked_for_and_a_cache_that_is_in_use_is_reported(
    bed: Callable[..., BedEngine], pause: Pause, is_busy: bool
) -> None:
    engine = bed()
    engine.is_busy = is_busy
    with Pusher([engine.url], config=replace(CONFIG, pause=pause)) as pusher:
        report = pusher.push(shards(checkpoint(1)), version=1)
    assert engine.pause_mode == pause
    assert report.engines[0].cache_flushed is not is_busy
    assert_serves(engine, 1)


@pytest.mark.parametrize(
    "setting", [{"verify": "none"}, {"dtype": "float32"}, {"staging": "cuda_ipc"}, {"disk_dir": "/tmp/x"}], ids=str
)
def test_settings_without_effect_are_refused(setting: dict[str, Any]) -> None:
    with pytest.raises(PushConfigError, match=f"`{next(iter(setting))}.* no effect"):
        PushConfig(way="staged", **setting)


def test_what_is_on_its_way_stays_below_the_limit(
    bed: Callable[..., BedEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = bed(tp=2)
    flying: list[Ticket] = []
    peaks: list[int] = []
    real_write, real_wait = TcpOutbox.write, TcpOutbox.wait

    def write(self: TcpOutbox, region: Region, offset: int, data: Any) -> Ticket:
        flying.append(real_write(self, region, offset, data))
        peaks.append(sum(ticket.nbytes for ticket in flying))
        return flying[-1]

    def wait(self: TcpOutbox, tickets: Iterable[Ticket], *, timeout_s: float) -> None:
        waited = list(tickets)
        real_wait(self, waited, timeout_s=timeout_s)
        flying[:] = [ticket for ticket in flying if ticket not in waited]

    monkeypatch.setattr(TcpOutbox, "write", write)
    monkeypatch.setattr(TcpOutbox, "wait", wait)
    config = replace(CONFIG, transport="tcp", max_inflight_bytes=64 * 1024)
    with Pusher([engine.url], config=config) as pusher:
        report = pusher.push(shards(checkpoint(1)), version=1)
    assert 32 * 1024 < max(peaks) <= 64 * 1024 < report.bytes
    assert_serves(engine, 1)


def test_verify_names_the_parameter_that_differs_and_what_was_derived_from_old_weights(
    bed: Callable[..., BedEngine],
) -> None:
    engine = bed(tp=2)
    with Pusher([engine.url], config=CONFIG) as pusher:
        pusher.push(shards(checkpoint(1)), version=1)
        (found,) = pusher.verify(shards(checkpoint(1))).values()
        assert found.is_equal
        assert found.unused == ()
        parameters = dict(engine.models[1].named_parameters())
        parameters["model.layers.1.self_attn.qkv_proj.weight"].data[-1, -1] += 1
        parameters["model.norm.weight"].data[0] += 1
        parameters[EMBEDDING].data[-1, 0] = 3  # padding
        (found,) = pusher.verify(shards(checkpoint(1))).values()
    assert found.different == (
        "model.layers.1.self_attn.qkv_proj.weight (model.layers.1.self_attn.v_proj.weight) on rank 1",
        "model.norm.weight (model.norm.weight) on rank 1",
    )
    assert found.padding == (f"{EMBEDDING} on rank 1",)
    assert found.stale == ("derived on rank 1",)
    assert engine.generate() is not None


def test_shards_in_another_element_type_are_converted_to_the_engines(bed: Callable[..., BedEngine]) -> None:
    engine = bed(dtype=torch.bfloat16)
    with Pusher([engine.url], config=CONFIG) as pusher:
        pusher.push(shards(checkpoint(1)), version=1)
    found = engine.generate()
    assert found is not None
    assert found["digests"] == digests(1, 1, dtype=torch.bfloat16)


def test_a_missing_tensor_is_named_and_no_engine_is_touched(bed: Callable[..., BedEngine]) -> None:
    engine = bed()
    tensors = checkpoint(1)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    with Pusher([engine.url], config=CONFIG) as pusher, pytest.raises(ShardError, match=r"layers\.1\.mlp\.up_proj"):
        pusher.push(shards(tensors), version=1)
    assert_serves(engine, 0)


def test_a_dead_engine_holds_nobody_up_and_comes_back_with_a_full_push_beside_a_delta(
    bed: Callable[..., BedEngine],
) -> None:
    good, bad = bed(tp=2), bed()
    with Pusher([good.url, bad.url], config=CONFIG) as pusher:
        pusher.push(shards(checkpoint(1)), version=1)
        bad.stop()
        with pytest.raises(SyncError, match=bad.url) as failure:
            pusher.push(shards(checkpoint(1, steps=1)), version=2)
        assert [outcome.ok for outcome in failure.value.engines] == [True, False]
        assert_serves(good, 1, steps=1, stamp=2)
        joiner = bed()
        pusher.set_engines([good.url, joiner.url])
        report = pusher.push(shards(checkpoint(1, steps=2)), version=3)
    assert [outcome.kind for outcome in report.engines] == ["delta", "full"]
    assert report.engines[1].reason == "the engine serves other weights than those pushed last"
    for engine in (good, joiner):
        assert_serves(engine, 1, steps=2, stamp=3)


@pytest.mark.parametrize(("history", "kind"), [(0, "full"), (1, "full"), (2, "delta"), (9, "delta")])
def test_an_engine_that_missed_pushes_gets_one_folded_delta(
    bed: Callable[..., BedEngine], history: int, kind: str
) -> None:
    here, away = bed(tp=2), bed()
    with Pusher([here.url, away.url], config=replace(CONFIG, delta_history=history)) as pusher:
        whole = pusher.push(shards(checkpoint(1)), version=1).engines[1].bytes
        pusher.set_engines([here.url])
        for steps in (1, 2):
            pusher.push(shards(checkpoint(1, steps=steps)), version=1 + steps)
        assert_serves(away, 1)
        pusher.set_engines([here.url, away.url])
        report = pusher.push(shards(checkpoint(1, steps=3)), version=4)
        for engine in (here, away):
            assert_serves(engine, 1, steps=3, stamp=4)
        assert [outcome.kind for outcome in report.engines] == ["delta", kind]
        assert (report.engines[1].bytes < whole / 3) == (kind == "delta")
        report = pusher.push(shards(checkpoint(1, steps=4)), version=5)
    assert [outcome.kind for outcome in report.engines] == ["delta", "delta"]
    assert_serves(away, 1, steps=4, stamp=5)


@pytest.mark.parametrize(
    ("steps", "says", "kind"),
    [(1, "2", "delta"), (2, "3", "delta"), (1, "3", "full"), (1, "77", "full"), (1, "default", "full")],
)
def test_an_engine_that_starts_from_a_pushed_version_is_believed_once_checked(
    bed: Callable[..., BedEngine], steps: int, says: str, kind: str
) -> None:
    here = bed(tp=2)
    with Pusher([here.url], config=replace(CONFIG, delta_history=3)) as pusher:
        for version in (1, 2, 3):
            pusher.push(shards(checkpoint(1, steps=version - 1)), version=version)
        back = bed(tp=2, loaded=checkpoint(1, steps=steps), says=says)
        pusher.set_engines([here.url, back.url])
        report = pusher.push(shards(checkpoint(1, steps=3)), version=4)
        for engine in (here, back):
            assert_serves(engine, 1, steps=3, stamp=4)
        assert [outcome.kind for outcome in report.engines] == ["delta", kind]
        report = pusher.push(shards(checkpoint(1, steps=4)), version=5)
    assert [outcome.kind for outcome in report.engines] == ["delta", "delta"]
    assert_serves(back, 1, steps=4, stamp=5)


def test_tensors_that_no_engine_has_are_told_once_and_values_that_are_not_there_are_refused(
    bed: Callable[..., BedEngine],
) -> None:
    engine = bed()
    with Pusher([engine.url], config=CONFIG) as pusher:
        odd = checkpoint(1) | {"model.oddity": torch.ones(2)}
        with pytest.warns(UserWarning, match=r"1 pushed tensors exist in no engine's model .*: model\.oddity"):
            pusher.push(shards(odd), version=1)
        pusher.push(shards(odd), version=2)  # a second warning would be an error
        for values, what in ((odd[EMBEDDING].to("meta"), "meta device"), (odd[EMBEDDING].to_sparse(), "not dense")):
            with pytest.raises(ShardError, match=f"`{EMBEDDING}`: the block is .*{what}"):
                pusher.push([next(shards(checkpoint(1)))._replace(tensor=values)], version=3)
    assert_serves(engine, 1, stamp=2)


def test_an_address_that_nobody_can_listen_on_is_told(bed: Callable[..., BedEngine]) -> None:
    config = replace(CONFIG, listen_host="192.0.2.1")
    with (
        Pusher([bed().url], config=config) as pusher,
        pytest.raises(SyncError, match=r"`listen_host = 192\.0\.2\.1` is"),
    ):
        pusher.push(shards(checkpoint(1)), version=1)


def test_a_history_without_an_effect_is_refused() -> None:
    with pytest.raises(PushConfigError, match="`delta_history = 2` has no effect with `way = tensor`"):
        PushConfig(delta_history=2)
    with pytest.raises(PushConfigError, match="no effect"):
        replace(CONFIG, delta="off", delta_history=2)
    with pytest.raises(PushConfigError, match="at least 0"):
        replace(CONFIG, delta_history=-1)
