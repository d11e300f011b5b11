"""A push against engines that unpickle with real PyTorch: what arrives, in which order, and what failures leave."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from miles_weightsync import PushConfig, PushConfigError, ShardError, SyncError
from miles_weightsync.push import Pusher
from weightsync_fakes import SHAPES, AShard, FakeEngine, shards, shm_names, weights

SMALL_BUCKETS = PushConfig(bucket_bytes=600, timeout_s=20)


def assert_serves(engine: FakeEngine, version: int) -> None:
    expected = weights(version)
    for name, tensor in engine.params.items():
        assert torch.equal(tensor, expected[name].to(tensor.dtype)), name
    assert engine.version == str(version)
    assert not engine.is_paused
    assert not engine.resumed_mixed


def whole(tensors: dict[str, torch.Tensor]) -> list[AShard]:
    return [
        AShard(name, tuple(t.shape), t.dtype, tuple((0, size) for size in t.shape), t) for name, t in tensors.items()
    ]


def test_every_tensor_arrives_bit_for_bit_and_the_version_is_stamped(engine: FakeEngine) -> None:
    with Pusher([engine.url], config=SMALL_BUCKETS) as pusher:
        report = pusher.push(shards(weights(3)), version=3)
    assert_serves(engine, 3)
    assert report.version == 3
    assert report.bytes == sum(tensor.nbytes for tensor in weights(3).values())
    assert report.num_tensors == len(SHAPES)
    assert report.num_buckets > 3
    assert report.engines[0].verified == "all"
    assert report.engines[0].num_verified == len(SHAPES) - 3  # q, k, v are one parameter, gate and up another
    assert 0 < report.pause_seconds <= report.total_seconds
    assert report.metrics["sync/bytes"] == report.bytes


def test_the_engine_is_paused_flushed_verified_and_stamped_in_this_order(engine: FakeEngine) -> None:
    with Pusher([engine.url], config=PushConfig()) as pusher:
        pusher.push(shards(weights(1)), version=1)
    assert engine.paths == [
        "/server_info",
        "/model_info",
        "/pause_generation",
        "/flush_cache",
        "/begin_weight_update",
        "/update_weights_from_tensor",
        "/end_weight_update",
        "/weights_checker",
        "/update_weight_version",
        "/continue_generation",
    ]
    assert dict(engine.requests)["/pause_generation"] == {"mode": "retract"}


def test_shared_memory_is_reused_between_pushes_and_grows_when_a_plan_needs_it(engine: FakeEngine) -> None:
    with Pusher([engine.url], config=PushConfig(bucket_bytes=600)) as pusher:
        pusher.push(shards(weights(1)), version=1)
        names = shm_names()
        pusher.push(shards(weights(2)), version=2)
        assert shm_names() == names
    assert_serves(engine, 2)


def test_two_engines_with_different_tensor_parallelism_are_both_verified(
    make_engine: Callable[..., FakeEngine],
) -> None:
    first, second = make_engine(tp=1), make_engine(tp=2)
    with Pusher([first.url, second.url], config=SMALL_BUCKETS) as pusher:
        report = pusher.push(shards(weights(1)), version=1)
    assert_serves(first, 1)
    assert_serves(second, 1)
    assert [outcome.verified for outcome in report.engines] == ["all", "all"]
    assert report.engines[1].num_verified == 2 * report.engines[0].num_verified


def test_weights_are_cast_to_the_type_of_the_engine_and_still_verified(make_engine: Callable[..., FakeEngine]) -> None:
    engine = make_engine(dtype="bfloat16")
    with Pusher([engine.url], config=SMALL_BUCKETS) as pusher:
        report = pusher.push(shards(weights(1)), version=1)
    assert_serves(engine, 1)
    assert report.bytes == sum(tensor.nbytes for tensor in weights(1).values()) // 2
    assert report.engines[0].verified == "all"


def test_keep_sends_the_trainers_type_and_the_engine_converts(make_engine: Callable[..., FakeEngine]) -> None:
    engine = make_engine(dtype="bfloat16")
    with Pusher([engine.url], config=PushConfig(dtype="keep")) as pusher:
        report = pusher.push(shards(weights(1)), version=1)
    assert_serves(engine, 1)
    assert report.bytes == sum(tensor.nbytes for tensor in weights(1).values())
    assert report.engines[0].verified == "all"


def test_engines_of_different_types_are_refused_until_the_user_decides(make_engine: Callable[..., FakeEngine]) -> None:
    urls = [make_engine(dtype=dtype).url for dtype in ("float32", "bfloat16")]
    with (
        Pusher(urls, config=PushConfig()) as pusher,
        pytest.raises(SyncError, match=r"different element types.*set `dtype`"),
    ):
        pusher.push(shards(weights(1)), version=1)


def test_in_place_keeps_the_cache_of_running_requests_and_says_so(engine: FakeEngine) -> None:
    engine.is_running = True
    with Pusher([engine.url], config=PushConfig(pause="in_place")) as pusher:
        report = pusher.push(shards(weights(1)), version=1)
        assert not report.engines[0].cache_flushed
        engine.is_running = False
        assert pusher.push(shards(weights(2)), version=2).engines[0].cache_flushed
    assert_serves(engine, 2)


def test_a_flush_is_asked_again_while_retracted_requests_let_go(engine: FakeEngine) -> None:
    engine.busy_flushes = 2
    with Pusher([engine.url], config=PushConfig()) as pusher:
        assert pusher.push(shards(weights(1)), version=1).engines[0].cache_flushed
    assert engine.paths.count("/flush_cache") == 3
    assert_serves(engine, 1)


def num_requests_of_a_push() -> int:
    engine = FakeEngine()
    try:
        with Pusher([engine.url], config=SMALL_BUCKETS) as pusher:
            pusher.push(shards(weights(1)), version=1)
        return len(engine.requests)
    finally:
        engine.stop()


def test_a_failure_at_any_request_leaves_the_engine_paused_and_the_next_push_recovers_it(
    make_engine: Callable[..., FakeEngine],
) -> None:
    for index in range(num_requests_of_a_push()):
        engine, healthy = make_engine(), make_engine()
        with Pusher([engine.url, healthy.url], config=SMALL_BUCKETS) as pusher:
            pusher.push(shards(weights(1)), version=1)
            engine.fail_at = len(engine.requests) + index
            with pytest.raises(SyncError, match="scripted failure") as caught:
                pusher.push(shards(weights(2)), version=2)
            failed, other = caught.value.engines
            assert (failed.ok, other.ok) == (False, True), f"request {index}"
            assert engine.url in str(caught.value)
            assert engine.is_paused, f"request {index}"
            assert failed.phase == caught.value.phase
            assert_serves(healthy, 2)
            assert shm_names() == [], f"request {index}"
            pusher.push(shards(weights(3)), version=3)
        assert_serves(engine, 3)
        assert_serves(healthy, 3)


def test_the_same_version_may_be_pushed_again_but_an_older_one_is_refused(engine: FakeEngine) -> None:
    with Pusher([engine.url], config=PushConfig()) as pusher:
        pusher.push(shards(weights(5)), version=5)
        pusher.push(shards(weights(5)), version=5)
        before = len(engine.requests)
        with pytest.raises(SyncError, match="Version 4 is older than 5"):
            pusher.push(shards(weights(4)), version=4)
        for version in (-1, 5.5, "6", True, None):
            with pytest.raises(SyncError, match="must be a whole number, not negative"):
                pusher.push(shards(weights(6)), version=version)  # type: ignore[arg-type]
        assert len(engine.requests) == before
        assert not engine.is_paused


def test_a_wrong_checksum_names_the_parameter_and_keeps_the_engine_paused(engine: FakeEngine) -> None:
    engine.corrupt = "model.layers.0.self_attn.k_proj.weight"
    with Pusher([engine.url], config=SMALL_BUCKETS) as pusher:
        with pytest.raises(
            SyncError, match=r"phase `verify`: .*1 of 8 parameters differ: model\.layers\.0\.self_attn\.qkv_proj"
        ):
            pusher.push(shards(weights(1)), version=1)
        assert engine.is_paused
        assert engine.version == "default"


def test_a_parameter_that_was_not_pushed_is_named(engine: FakeEngine) -> None:
    tensors = weights(1)
    del tensors["model.norm.weight"]
    with (
        Pusher([engine.url], config=PushConfig()) as pusher,
        pytest.raises(SyncError, match=r"phase `plan`: .* were not pushed: model\.norm\.weight"),
    ):
        pusher.push(shards(tensors), version=1)
    assert not engine.is_paused


def test_a_tied_output_layer_may_be_pushed_but_must_equal_the_embedding(engine: FakeEngine) -> None:
    engine.params["lm_head.weight"] = torch.zeros(10, 8)
    fused_without_head = engine.do_weights_checker

    def checker(body: dict[str, object]) -> tuple[int, dict[str, list[dict[str, dict[str, str]]]]]:
        status, answer = fused_without_head(body)
        del answer["ranks"][0]["checksums"]["lm_head.weight"]
        return status, answer

    engine.do_weights_checker = checker  # type: ignore[method-assign]
    tensors = weights(1)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    with Pusher([engine.url], config=PushConfig()) as pusher:
        pusher.push(shards(tensors), version=1)
        tensors["lm_head.weight"][3] += 1
        with pytest.raises(SyncError, match=r"do not exist in the engine: lm_head\.weight"):
            pusher.push(shards(tensors), version=2)


def test_an_unknown_architecture_is_verified_where_names_match_and_warned_about_once(
    make_engine: Callable[..., FakeEngine],
) -> None:
    engine = make_engine(architecture="NewForCausalLM")
    with Pusher([engine.url], config=PushConfig()) as pusher:
        with pytest.warns(UserWarning, match="NewForCausalLM"):
            report = pusher.push(shards(weights(1)), version=1)
        assert report.engines[0].verified == "part"
        assert report.engines[0].num_verified == 4  # o_proj and the norms; the embedding and down_proj are padded
        pusher.push(shards(weights(2)), version=2)
        engine.corrupt = "model.norm.weight"
        with pytest.raises(SyncError, match=r"1 of 6 parameters differ: model\.norm\.weight"):
            pusher.push(shards(weights(3)), version=3)


def test_no_verification_is_made_when_none_is_asked_for(engine: FakeEngine) -> None:
    with Pusher([engine.url], config=PushConfig(verify="none")) as pusher:
        assert pusher.push(shards(weights(1)), version=1).engines[0].verified == "none"
    assert "/weights_checker" not in engine.paths


def test_two_pushes_at_once_are_refused_within_and_between_pushers(engine: FakeEngine) -> None:
    entered, go_on = threading.Event(), threading.Event()

    def hold(path: str) -> None:
        if path == "/begin_weight_update":
            entered.set()
            assert go_on.wait(20)

    engine.on_request = hold
    same = engine.url.replace("127.0.0.1", "localhost")
    with Pusher([engine.url], config=PushConfig()) as pusher, Pusher([same], config=PushConfig()) as other:
        first = threading.Thread(target=pusher.push, args=(list(shards(weights(1))),), kwargs={"version": 1})
        first.start()
        assert entered.wait(20)
        for second in (pusher, other):
            with pytest.raises(SyncError, match="Another push"):
                second.push(shards(weights(2)), version=2)
        go_on.set()
        first.join()
        engine.on_request = lambda path: None
        other.push(shards(weights(2)), version=2)
    assert_serves(engine, 2)


def test_a_hanging_engine_fails_by_its_deadline_and_the_other_serves(make_engine: Callable[..., FakeEngine]) -> None:
    slow, fast = make_engine(), make_engine()
    release = threading.Event()
    slow.on_request = lambda path: None if path != "/end_weight_update" else (release.wait(20), None)[1]
    with Pusher([slow.url, fast.url], config=PushConfig(timeout_s=0.5)) as pusher:
        with pytest.raises(SyncError, match=r"1 of 2 engines.*no answer within the push's 0\.5 s"):
            pusher.push(shards(weights(1)), version=1)
        release.set()
        assert_serves(fast, 1)
        assert slow.is_paused


def test_a_dead_engine_is_named_and_replaced(make_engine: Callable[..., FakeEngine]) -> None:
    dead, alive = make_engine(), make_engine()
    url = dead.url
    with Pusher([url, alive.url], config=PushConfig(timeout_s=10)) as pusher:
        dead._server.server_close()
        dead._server.shutdown()
        with pytest.raises(SyncError, match=rf"{url} failed in phase `probe`.*left its weights as they were"):
            pusher.push(shards(weights(1)), version=1)
        assert_serves(alive, 1)
        pusher.set_engines([alive.url, make_engine().url])
        assert len(pusher.push(shards(weights(2)), version=2).engines) == 2


def test_an_engine_that_shared_memory_cannot_serve_is_refused_before_it_is_touched(
    make_engine: Callable[..., FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    replicas = make_engine(dp=2)
    with (
        Pusher([replicas.url], config=PushConfig()) as pusher,
        pytest.raises(SyncError, match="2 data-parallel replicas"),
    ):
        pusher.push(shards(weights(1)), version=1)
    far = make_engine()
    monkeypatch.setattr("miles_weightsync.fleet.is_local", lambda url: False)
    with Pusher([far.url], config=PushConfig()) as pusher, pytest.raises(SyncError, match=r"another host.*way = disk"):
        pusher.push(shards(weights(1)), version=1)
    assert not replicas.is_paused
    assert not far.is_paused


@pytest.mark.parametrize("way", ["tensor", "disk"])
def test_tensors_that_the_engine_could_not_load_are_named_before_it_is_touched(
    engine: FakeEngine, tmp_path: Path, way: str
) -> None:
    norm, query = "model.norm.weight", "model.layers.0.self_attn.q_proj.weight"
    config = PushConfig(way="disk", disk_dir=str(tmp_path)) if way == "disk" else PushConfig()
    with Pusher([engine.url], config=config) as pusher:
        for changed, message in (
            ({query: torch.ones(7, 8)}, rf"{query} \(7, 8\) instead of \(8, 8\)"),
            ({norm: torch.tensor(1.0)}, rf"{norm} \(\) instead of \(8,\)"),
            ({norm: torch.ones(8, dtype=torch.bool)}, f"no floating-point numbers: {norm} bool"),
            ({"model.oddity": torch.ones(3)}, "1 pushed tensors do not exist in the engine's model: model.oddity"),
        ):
            with pytest.raises(SyncError, match=f"phase `plan`: .*{message}.*left its weights as they were"):
                pusher.push(whole(weights(1) | changed), version=1)
        assert not {"/pause_generation", "/begin_weight_update"} & set(engine.paths)
        assert [path.name for path in tmp_path.iterdir()] == []
        pusher.push(shards(weights(2)), version=2)
    assert_serves(engine, 2)


def test_a_mistake_of_ours_while_verifying_keeps_the_engine_paused(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object) -> None:
        raise IndexError("a mistake of ours")

    with Pusher([engine.url], config=PushConfig()) as pusher:
        with monkeypatch.context() as patch:
            patch.setattr("miles_weightsync.checksum.ExpectedChecksums.add", broken)
            with pytest.raises(SyncError, match=r"phase `verify`: IndexError: a mistake of ours.*stays paused"):
                pusher.push(shards(weights(1)), version=1)
        assert engine.is_paused
        assert engine.version == "default"
        pusher.push(shards(weights(2)), version=2)
    assert_serves(engine, 2)


def test_an_address_at_which_something_else_answers_is_told(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeEngine, "answer", lambda *args: (200, "<html>"))
    config = PushConfig(verify="none")
    with Pusher([engine.url], config=config) as pusher, pytest.raises(SyncError, match="is no SGLang server"):
        pusher.push(shards(weights(1)), version=1)


def test_bad_shards_are_refused_before_any_engine_is_paused(engine: FakeEngine) -> None:
    half = AShard("a", (4, 2), torch.float32, ((0, 2), (0, 2)), torch.zeros(2, 2))
    with Pusher([engine.url], config=PushConfig()) as pusher:
        with pytest.raises(ShardError, match=r"`a` \(4, 2\): the shards cover 4 of 8 elements.*\[0:2, 0:2\]"):
            pusher.push([half], version=1)
        with pytest.raises(ShardError, match="A shard is called ''"):
            pusher.push([half._replace(name="")], version=1)
        with pytest.raises(SyncError, match="'float' object cannot be interpreted as an integer"):
            pusher.push([half._replace(box=((0, 2.7), (0, 2)))], version=1)
        with pytest.raises(ShardError, match="nothing to push"):
            pusher.push([], version=1)
        assert not engine.is_paused
        pusher.push(shards(weights(1)), version=1)


def test_the_disk_way_loads_a_complete_folder_and_prunes_old_ones(engine: FakeEngine, tmp_path: Path) -> None:
    template = tmp_path / "base"
    template.mkdir()
    (template / "config.json").write_text("{}")
    (template / "model.safetensors").write_text("old weights")
    root = tmp_path / "versions"
    config = PushConfig(way="disk", disk_dir=str(root), disk_template=str(template), bucket_bytes=600)
    with Pusher([engine.url], config=config) as pusher:
        for version in (1, 2, 3):
            report = pusher.push(shards(weights(version)), version=version)
            assert report.engines[0].verified == "all"
    assert_serves(engine, 3)
    assert sorted(path.name for path in root.iterdir()) == ["version_000002", "version_000003"]
    names = {path.name for path in (root / "version_000003").iterdir()}
    assert {"config.json", "model.safetensors.index.json"} <= names
    assert "model.safetensors" not in names
    assert "/begin_weight_update" not in engine.paths


def test_a_failure_at_any_request_of_the_disk_way_is_recovered_too(engine: FakeEngine, tmp_path: Path) -> None:
    config = PushConfig(way="disk", disk_dir=str(tmp_path), timeout_s=20)
    with Pusher([engine.url], config=config) as pusher:
        pusher.push(shards(weights(1)), version=1)
        for index in range(len(engine.requests)):
            engine.fail_at = len(engine.requests) + index
            with pytest.raises(SyncError, match="scripted failure"):
                pusher.push(shards(weights(2)), version=2)
            assert engine.is_paused, f"request {index}"
            pusher.push(shards(weights(2)), version=2)
            assert_serves(engine, 2)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_errors_survive_pickling_between_processes(engine: FakeEngine) -> None:
    engine.fail_at = 5
    with Pusher([engine.url], config=PushConfig()) as pusher, pytest.raises(SyncError) as caught:
        pusher.push(shards(weights(1)), version=1)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (str(copy), copy.phase, copy.engines) == (str(caught.value), "load", caught.value.engines)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bucket_bytes": 0}, "bucket_bytes.*0"),
        ({"timeout_s": 0}, "timeout_s.*0"),
        ({"disk_dir": "/x"}, "no effect with `way = tensor`"),
        ({"way": "disk", "staging": "cuda_ipc"}, "no effect with `way = disk`"),
        ({"disk_keep": 0}, "disk_keep"),
        ({"disk_keep": 3}, "`disk_keep = 3` has no effect with `way = tensor`, only with `disk`"),
        ({"transport": "tcp"}, "`transport = tcp` has no effect with `way = tensor`, only with `staged`"),
        ({"delta": "small"}, "`delta = small` has no effect .* only with `staged` and `store`"),
        ({"way": "disk", "max_inflight_bytes": 1}, "`max_inflight_bytes = 1` has no effect"),
        ({"listen_host": "0.0.0.0"}, "`listen_host = 0.0.0.0` has no effect"),
        ({"way": "stage"}, "`way` is 'stage'; it must be one of tensor, disk, staged, store"),
        ({"verify": "checksums"}, "`verify` is 'checksums'; it must be one of checksum, none"),
        ({"timeout_s": float("inf")}, "`timeout_s` is inf"),
    ],
)
def test_a_setting_without_effect_or_sense_is_an_error(options: dict[str, object], message: str) -> None:
    with pytest.raises(PushConfigError, match=message):
        PushConfig(**options)  # type: ignore[arg-type]


def test_the_engines_and_the_folder_are_checked_when_the_pusher_is_made() -> None:
    with pytest.raises(PushConfigError, match="at least one URL"):
        Pusher([], config=PushConfig())
    with pytest.raises(PushConfigError, match="twice"):
        Pusher(["http://a", "http://a/"], config=PushConfig())
    with pytest.raises(PushConfigError, match="twice"):
        Pusher(["http://localhost:30000", "http://127.0.0.1:30000"], config=PushConfig())
    for url in ("127.0.0.1:30000", "ftp://a:1", "http://", "http://a:99999", "http://a:1?b"):
        with pytest.raises(PushConfigError, match="is not the address of an engine"):
            Pusher([url], config=PushConfig())
    with pytest.raises(PushConfigError, match="disk_dir"):
        Pusher(["http://a"], config=PushConfig(way="disk"))
