from __future__ import annotations

import json
import struct

import pytest
from miles_core.config import Config, ConfigError, load_config
from miles_core.config.plugins import check_plugins
from miles_core.run.dry_run import engine_memory, list_processes, make_plan, read_shape, trainer_memory
from miles_rollout.engines import EngineConfig
from miles_train import FSDPConfig, LossConfig, TrainConfig

LLAMA = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 1000,
    "tie_word_embeddings": True,
}


@pytest.fixture
def model(tmp_path):
    def write(config=LLAMA, tensors=None):
        (tmp_path / "config.json").write_text(json.dumps(config))
        if tensors:
            entry = {"dtype": "F32", "data_offsets": [0, 0]}
            header = json.dumps({"__metadata__": {}} | {name: {"shape": s} | entry for name, s in tensors.items()})
            (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header.encode())
        return tmp_path

    return write


def test_parameters_are_counted_in_the_files_or_computed_from_the_config(model):
    computed = read_shape(model()).num_parameters
    attention, feed_forward, norms = 64 * 64 * 2 + 64 * 32 * 2, 3 * 64 * 128, 2 * 64
    assert computed == 1000 * 64 + 2 * (attention + feed_forward + norms) + 64
    assert read_shape(model(tensors={"a": [10, 20], "b": [5], "scalar": []})).num_parameters == 206


def test_experts_and_untied_embeddings_count(model):
    dense = read_shape(model()).num_parameters
    untied = read_shape(model(LLAMA | {"tie_word_embeddings": False})).num_parameters
    moe = read_shape(model(LLAMA | {"num_experts": 4, "moe_intermediate_size": 32})).num_parameters
    assert untied - dense == 64_000
    assert moe - dense == 2 * (3 * 64 * 32 * 4 + 64 * 4 - 3 * 64 * 128)


def test_a_rank_holds_weights_gradients_and_two_moments_of_its_share(model):
    shape = read_shape(model(tensors={"w": [1000, 1000]}))
    alone = trainer_memory(TrainConfig(), shape, device="cpu")
    assert (alone["weights"], alone["gradients"], alone["AdamW"]) == (4e6, 4e6, 8e6)
    assert alone["copy for checkpoints"] == 12e6
    assert trainer_memory(TrainConfig(ranks=2), shape, device="cpu")["AdamW"] == 4e6
    mixed = trainer_memory(TrainConfig(dtype="bfloat16", loss=LossConfig(kl_coef=0.1)), shape, device="cuda")
    assert mixed["reference"] == 2e6
    assert mixed["activations"] == alone["activations"] / 2
    assert "copy for checkpoints" not in mixed, "it lies in host memory"
    checkpointed = trainer_memory(TrainConfig(fsdp=FSDPConfig(activation_checkpointing=True)), shape, device="cpu")
    assert checkpointed["activations"] < alone["activations"] / 10


def test_an_engine_holds_weights_and_its_cache(model):
    shape = read_shape(model(tensors={"w": [1000, 1000]}))
    parts = engine_memory(EngineConfig(max_total_tokens=1000), TrainConfig(), shape, device="cpu")
    assert parts == {"weights": 4e6, "KV cache of 1000 tokens": 1000 * 2 * 2 * 2 * 16 * 4}
    assert "weights" in engine_memory(EngineConfig(tp=2), TrainConfig(dtype="bfloat16"), shape, device="cuda")


def test_every_process_of_a_run_is_listed():
    words = ["--engines.rollout.count", "2", "--engines.judge.role", "eval", "--sessions.count", "3"]
    words += ["--engines.far.urls", '["http://host:1"]']
    processes = {p.name: p.count for p in list_processes(load_config(words).config, "rl", None)}
    assert processes == {
        "trainer rank": 1,
        "engine rollout": 2,
        "engine judge": 1,
        "engine far": 0,
        "router rollout": 1,
        "session server": 3,
        "worker": 1,
        "driver, Ray": 1,
    }
    assert [p.name for p in list_processes(Config(), "sft", None)] == ["trainer rank", "driver, Ray"]


def test_an_evaluation_beside_training_has_processes_of_its_own():
    words = ["--eval.mode", "dedicated", "--engines.rollout.count", "1", "--engines.judge.role", "eval"]
    listed = [f"{p.count} {p.name} {p.note}" for p in list_processes(load_config(words).config, "rl", None)]
    assert "1 session server of the evaluation" in listed
    assert "1 worker of the evaluation" in listed
    words = ["--eval.mode", "external", "--eval.external", "no_such_module:score"]
    config = load_config(words).config
    assert "evaluation" in [p.name for p in list_processes(config, "rl", None)]
    with pytest.raises(ConfigError, match=r"eval\.external is 'no_such_module:score' but there is no module"):
        check_plugins(config, "rl")


def test_the_plan_says_what_does_not_fit(model, monkeypatch):
    folder = model(tensors={"w": [1000, 1000]})
    config = load_config(["--model.path", str(folder), "--env.target", "json:loads", "--train.device", "cpu"]).config
    assert "does not fit" not in make_plan(config, "rl")
    monkeypatch.setattr("miles_core.run.dry_run.available_memory", lambda: 1000)
    text = make_plan(config, "rl")
    assert "1.0 M parameters" in text
    assert "16 groups of 8 · max_staleness 1, at most 32 groups open" in text
    assert "warning: this does not fit\n" in text


def test_the_plan_says_what_checkpoints_take(model, monkeypatch):
    folder = model(tensors={"w": [2**14, 2**14]})
    words = ["--model.path", str(folder), "--env.target", "json:loads"]
    monkeypatch.setattr("miles_core.run.dry_run.free_disk", lambda directory: 10 * 2**30)
    text = make_plan(load_config([*words, "--checkpoint.keep", "1"]).config, "rl")
    assert text.endswith(
        "checkpoints every 10 steps of 3.00 GiB each; with those kept and one being written 6.00 GiB of 10.00 GiB of "
        "disk free at runs"
    )
    text = make_plan(load_config([*words, "--checkpoint.keep-every", "50", "--checkpoint.every", "0"]).config, "rl")
    assert "checkpoints at the end of 3.00 GiB each; with those kept and one being written 15.00 GiB" in text
    assert text.endswith("warning: this does not fit; lower checkpoint.keep, or set run.dir")


def test_a_model_that_is_built_later_has_no_estimate():
    config = load_config(["--model.builder", "json:loads", "--env.target", "json:loads"]).config
    assert "its size is known once that has run" in make_plan(config, "rl")
    assert "checkpoints every 10 steps, 2 kept" in make_plan(config, "rl")
