"""Two real SGLang servers on the CPU, two trainer ranks: staged pushes while requests run, a death, and a return."""

from __future__ import annotations

import importlib.util
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

if importlib.util.find_spec("sglang") is None or importlib.util.find_spec("miles_rollout") is None:
    pytest.skip("needs SGLang and the CPU launcher of miles-rollout", allow_module_level=True)

from staged_trainer import Trainer
from test_sglang import PROMPT, assert_scored_by, call, make_model, running_request, server, state

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(400)]

LOADER = "miles_weightsync.receiver.load"


def greedy(url: str) -> tuple[list[int], list[float]]:
    sampling = {"max_new_tokens": 24, "temperature": 0.0, "ignore_eos": True}
    answer = call(url, "/generate", {"input_ids": PROMPT, "return_logprob": True, "sampling_params": sampling})
    return answer["output_ids"], [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]


def step_of(model: Any, *, seed: int) -> Any:
    """As an optimizer step at a small learning rate leaves it: few elements change."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        index = torch.randint(parameter.numel(), (max(1, parameter.numel() // 60),), generator=generator)
        parameter.data.view(-1)[index] *= 1.01
    return model


def test_two_engines_follow_two_trainer_ranks_through_a_death(tmp_path: Path) -> None:
    make_model("Qwen3").save_pretrained(tmp_path)
    models = {1: make_model("Qwen3", seed=1), 2: make_model("Qwen3", seed=2)}
    models[3] = step_of(make_model("Qwen3", seed=2), seed=3)
    models[4] = step_of(step_of(make_model("Qwen3", seed=2), seed=3), seed=4)
    models[5] = step_of(step_of(step_of(make_model("Qwen3", seed=2), seed=3), seed=4), seed=5)
    models[6] = step_of(step_of(step_of(step_of(make_model("Qwen3", seed=2), seed=3), seed=4), seed=5), seed=6)
    for version, model in models.items():
        torch.save(state(model), tmp_path / f"v{version}.pt")
    again = tmp_path / "again"
    models[3].save_pretrained(again)
    with ExitStack() as held:
        servers = [server(tmp_path, tp=tp, custom_weight_loader=LOADER) for tp in (1, 2)]
        for each in servers:
            held.callback(each.stop)
            each.start()
        trainer = Trainer(tmp_path)
        held.callback(trainer.close)
        a, b = (each.wait_ready() for each in servers)
        trainer.wait_until_ready()

        # Whole, from FSDP2 over shared memory, with a request running on each.
        with running_request(a, 900) as result_a, running_request(b, 900) as result_b:
            done = trainer.push("fsdp2", "shm", 1, [a, b])
            results = [result_a(), result_b()]
        assert done["error"] is None
        assert [engine["kind"] for engine in done["engines"]] == ["full", "full"]
        for ids, logprobs, meta in results:
            old, new = meta["weight_versions"]
            assert (old["version"], new["version"], new["end"]) == ("0", "1", 900)
            assert old["end"] == new["start"] > 0
            assert_scored_by(make_model("Qwen3"), ids, logprobs, 0, old["end"])
            assert_scored_by(models[1], ids, logprobs, new["start"], 900)

        # Whole from Megatron's shards over TCP, then what changed.
        done = trainer.push("megatron", "tcp", 2, [a, b], verify=True)
        assert (done["error"], done["equal"]) == (None, [True, True])
        whole = done["engines"][0]["bytes"]
        done = trainer.push("megatron", "tcp", 3, [a, b], verify=True)
        assert (done["error"], done["equal"]) == (None, [True, True])
        assert [engine["kind"] for engine in done["engines"]] == ["delta", "delta"]
        assert done["engines"][0]["bytes"] < whole / 8
        committed = greedy(a)
        assert_scored_by(models[3], *greedy(b), 0, 24)

        # The first server dies in mid-transfer. The second commits.
        done = trainer.push("megatron", "tcp", 4, [a, b], kill=servers[0].process.session_id)
        assert [engine["ok"] for engine in done["engines"]] == [False, True]
        assert_scored_by(models[4], *greedy(b), 0, 24)

        # It comes back on the checkpoint of version 3, where it answers what it answered after that commit.
        a = held.enter_context(server(again, custom_weight_loader=LOADER, weight_version=3)).url
        assert greedy(a) == committed
        done = trainer.push("megatron", "tcp", 5, [a, b], verify=True)
        assert (done["error"], done["equal"]) == (None, [True, True])
        assert [engine["kind"] for engine in done["engines"]] == ["delta", "delta"]  # 3 → 5, and 4 → 5
        done = trainer.push("megatron", "tcp", 6, [a, b], verify=True)
        assert (done["error"], done["equal"]) == (None, [True, True])
        assert [engine["kind"] for engine in done["engines"]] == ["delta", "delta"]
        for engine in (a, b):
            assert_scored_by(models[6], *greedy(engine), 0, 24)
