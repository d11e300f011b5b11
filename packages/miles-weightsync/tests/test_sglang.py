"""A real SGLang server on the CPU: new weights are served exactly, and never a mixture."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from miles_weightsync import PushConfig, SyncError
from miles_weightsync.engine import EngineClient
from miles_weightsync.push import Pusher
from weightsync_fakes import shards

if importlib.util.find_spec("sglang") is None or importlib.util.find_spec("miles_rollout") is None:
    pytest.skip("needs SGLang and the CPU launcher of miles-rollout", allow_module_level=True)

from miles_rollout.engines import EngineConfig, EngineServer
from miles_rollout.engines.config import OptionValue

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(240)]

PROMPT = [5, 17, 42, 99, 250, 3]
CONFIG = PushConfig(bucket_bytes=64 * 1024, timeout_s=60)
START_S = 150.0
_numbers = count()


def make_model(kind: str, *, seed: int = 0, intermediate_size: int = 96) -> Any:
    """A small random model; 300 is not a multiple of 64, so the engine pads its vocabulary."""
    import transformers

    config: dict[str, Any] = dict(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=intermediate_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.2,
        tie_word_embeddings=kind == "Qwen3",
    )
    if kind == "Qwen3":
        config["head_dim"] = 16
    torch.manual_seed(seed)
    model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**config))
    for parameter in model.parameters():  # biases and norms start at 0 and 1, where mistakes do not show
        if parameter.dim() == 1:
            parameter.data.uniform_(0.5, 1.5)
    return model.float().eval()


def server(folder: Path, *, tp: int = 1, weight_version: int = 0, **options: OptionValue) -> EngineServer:
    """A server of the model in a folder, to `start` or to enter. It dies with this process."""
    options = {"skip-tokenizer-init": True, "random-seed": 1, **options}
    config = EngineConfig(
        device="cpu",
        tp=tp,
        threads=1,
        context_length=1024,
        max_total_tokens=8192,
        start_timeout_s=START_S,
        options=options,
    )
    return EngineServer(
        config, model_path=folder, log_path=folder / f"server{next(_numbers)}.log", weight_version=weight_version
    )


def call(url: str, path: str, body: dict[str, Any]) -> Any:
    answer = httpx.post(url + path, json=body, timeout=60, trust_env=False)
    assert answer.status_code == 200, answer.text
    return answer.json() if answer.content else None


def generate(url: str, num_tokens: int) -> tuple[list[int], list[float], dict[str, Any]]:
    sampling = {"max_new_tokens": num_tokens, "temperature": 1.0, "ignore_eos": True}
    answer = call(url, "/generate", {"input_ids": PROMPT, "return_logprob": True, "sampling_params": sampling})
    meta = answer["meta_info"]
    return answer["output_ids"], [entry[0] for entry in meta["output_token_logprobs"]], meta


def assert_scored_by(model: Any, ids: list[int], logprobs: list[float], start: int, stop: int) -> None:
    """The engine's log-probs of ids[start:stop] are the model's, to 1e-4."""
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT + ids])).logits[0].log_softmax(-1)
    for i in range(start, stop):
        assert abs(logits[len(PROMPT) + i - 1, ids[i]].item() - logprobs[i]) <= 1e-4, f"token {i}"


def assert_serves(url: str, model: Any, version: int) -> None:
    ids, logprobs, meta = generate(url, 24)
    assert meta["weight_versions"] == [{"version": str(version), "start": 0, "end": 24}]
    assert_scored_by(model, ids, logprobs, 0, 24)


def state(model: Any) -> dict[str, torch.Tensor]:
    return dict(model.state_dict())


@contextmanager
def running_request(url: str, num_tokens: int) -> Iterator[Callable[[], tuple[list[int], list[float], dict[str, Any]]]]:
    """A request that is already generating; calling the result waits for its answer."""
    answers: list[tuple[list[int], list[float], dict[str, Any]]] = []
    thread = threading.Thread(target=lambda: answers.append(generate(url, num_tokens)))
    call(url, "/slow_down", {"forward_sleep_time": 0.01})
    thread.start()
    while not httpx.get(f"{url}/v1/loads", timeout=60, trust_env=False).json()["loads"][0]["num_running_reqs"]:
        pass

    def result() -> tuple[list[int], list[float], dict[str, Any]]:
        call(url, "/slow_down", {"forward_sleep_time": None})
        thread.join(60)
        return answers[0]

    yield result
    thread.join(60)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("qwen3")
    make_model("Qwen3").save_pretrained(folder)
    with server(folder) as started:
        yield started.url


@pytest.fixture
def pusher(url: str) -> Iterator[Pusher]:
    with Pusher([url], config=CONFIG) as made:
        yield made


def test_after_a_push_the_engine_scores_like_the_new_model_and_every_checksum_is_equal(
    url: str, pusher: Pusher
) -> None:
    for version in (1, 2):
        model = make_model("Qwen3", seed=version)
        report = pusher.push(shards(state(model)), version=version)
        assert report.num_buckets > 2
        assert (report.engines[0].verified, report.engines[0].num_verified) == ("all", 18)
        assert_serves(url, model, version)


def test_a_retracted_request_continues_under_the_new_weights_with_both_versions_named(url: str, pusher: Pusher) -> None:
    old, new = make_model("Qwen3", seed=3), make_model("Qwen3", seed=4)
    pusher.push(shards(state(old)), version=3)
    with running_request(url, 300) as result:
        report = pusher.push(shards(state(new)), version=4)
        ids, logprobs, meta = result()
    assert report.engines[0].cache_flushed
    first, second = meta["weight_versions"]
    assert (first["version"], second["version"]) == ("3", "4")
    assert first["end"] == second["start"]
    assert second["end"] == 300
    assert_scored_by(old, ids, logprobs, 0, first["end"])
    assert_scored_by(new, ids, logprobs, second["start"], 300)


def test_in_place_keeps_a_request_running_and_says_that_its_cache_is_old(url: str) -> None:
    old, new = make_model("Qwen3", seed=5), make_model("Qwen3", seed=6)
    with Pusher([url], config=PushConfig(pause="in_place", timeout_s=60)) as pusher:
        pusher.push(shards(state(old)), version=5)
        with running_request(url, 300) as result:
            report = pusher.push(shards(state(new)), version=6)
            ids, logprobs, meta = result()
    assert not report.engines[0].cache_flushed
    assert [span["version"] for span in meta["weight_versions"]] == ["5", "6"]
    assert_scored_by(old, ids, logprobs, 0, meta["weight_versions"][0]["end"])


def test_abort_ends_running_requests_with_the_tokens_they_have(url: str) -> None:
    old, new = make_model("Qwen3", seed=7), make_model("Qwen3", seed=8)
    with Pusher([url], config=PushConfig(pause="abort", timeout_s=60)) as pusher:
        pusher.push(shards(state(old)), version=7)
        with running_request(url, 300) as result:
            pusher.push(shards(state(new)), version=8)
            ids, logprobs, meta = result()
    assert meta["finish_reason"]["type"] == "abort"
    assert len(ids) == len(logprobs) < 300
    assert_scored_by(old, ids, logprobs, 0, len(ids))
    assert_serves(url, new, 8)


@pytest.mark.parametrize("step", ["begin", "load_tensors", "end", "checksums", "stamp", "resume"])
def test_a_push_that_breaks_leaves_the_engine_paused_and_the_next_one_serves(
    url: str, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """The trainer's connection breaks after the engine has carried the step out."""
    real = getattr(EngineClient, step)

    def carried_out_but_unheard(client: EngineClient, *args: Any) -> None:
        real(client, *args)
        from miles_weightsync import EngineRequestError

        raise EngineRequestError("the connection was cut")

    broken, whole = make_model("Qwen3", seed=9), make_model("Qwen3", seed=10)
    waiting: list[tuple[list[int], list[float], dict[str, Any]]] = []
    with Pusher([url], config=CONFIG) as pusher:
        with monkeypatch.context() as patch:
            patch.setattr(EngineClient, step, carried_out_but_unheard)
            with pytest.raises(SyncError, match="connection was cut"):
                pusher.push(shards(state(broken)), version=9)
        is_ready = httpx.get(f"{url}/ready", timeout=60, trust_env=False).status_code == 200
        assert is_ready == (step == "resume")  # that one was carried out: the version is whole
        thread = threading.Thread(target=lambda: waiting.append(generate(url, 8)))
        if not is_ready:
            thread.start()
        pusher.push(shards(state(whole)), version=10)
    if not is_ready:
        thread.join(60)
        ids, logprobs, meta = waiting[0]
        assert [span["version"] for span in meta["weight_versions"]] == ["10"]
        assert_scored_by(whole, ids, logprobs, 0, 8)
    assert_serves(url, whole, 10)


def test_a_parameter_that_the_trainer_left_out_is_found_by_name(url: str, pusher: Pusher) -> None:
    model = make_model("Qwen3", seed=11)
    partial = state(model)
    del partial["model.layers.1.self_attn.k_norm.weight"]
    with pytest.raises(SyncError, match=r"not pushed: model\.layers\.1\.self_attn\.k_norm\.weight"):
        pusher.push(shards(partial), version=11)
    pusher.push(shards(state(model)), version=11)
    assert_serves(url, model, 11)


def test_the_disk_way_serves_the_new_weights_too(url: str, tmp_path: Path) -> None:
    model = make_model("Qwen3", seed=12)
    config = PushConfig(way="disk", disk_dir=str(tmp_path), bucket_bytes=64 * 1024, timeout_s=60)
    with Pusher([url], config=config) as pusher:
        report = pusher.push(shards(state(model)), version=12)
    assert report.engines[0].verified == "all"
    assert_serves(url, model, 12)


@pytest.mark.parametrize(("kind", "tp"), [("Llama", 1), ("Qwen2", 2)])
def test_other_families_and_tensor_parallelism_are_verified_as_well(tmp_path: Path, kind: str, tp: int) -> None:
    make_model(kind).save_pretrained(tmp_path)
    model = make_model(kind, seed=1)
    with server(tmp_path, tp=tp) as started, Pusher([started.url], config=CONFIG) as pusher:
        report = pusher.push(shards(state(model)), version=1)
        assert report.engines[0].verified == "all"
        assert_serves(started.url, model, 1)
