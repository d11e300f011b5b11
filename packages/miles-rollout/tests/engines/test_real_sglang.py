"""A real SGLang server on the CPU: what training relies on, and what stays behind (nothing)."""

from __future__ import annotations

import asyncio
import importlib.util
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from miles_rollout.engines import EngineConfig, EngineControl, EngineServer
from miles_rollout.engines.router import ROUTING_KEY, Router
from miles_tito import EngineError, FinishReason, Sampling, SGLangEngine
from miles_tito.engine.generation import GenerateRequest, Generation, join, run_turn
from miles_tito.engine.lost_requests import WatchedEngine
from miles_tito.shared.http import Http

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.timeout(400),
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed"),
]

VOCAB = 512
OPTIONS = {"skip-tokenizer-init": True}
PROMPTS = [[5, 6, 7], [100, 3, 3, 250, 17, 42], list(range(1, 300, 7))]
MAX_GAP = 1e-4


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two random layers of Qwen3."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        initializer_range=0.3,  # peaked: log-probs from 0 to -30
    )
    path = tmp_path_factory.mktemp("qwen3")
    Qwen3ForCausalLM(config).float().save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def server(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    log_path = tmp_path_factory.mktemp("log") / "engine.log"
    config = EngineConfig(device="cpu", context_length=2048, max_total_tokens=8192, options=OPTIONS)
    with EngineServer(config, model_path=model_path, log_path=log_path) as server:
        yield server


@pytest.fixture
async def control(server: EngineServer) -> AsyncIterator[EngineControl]:
    async with EngineControl(server.url) as control:
        yield control
        await control.resume()
        await control.abort()
        await slow_down(control, None)
        await control.set_weight_version(0)


async def generate(url: str, ids: list[int], *, rid: str | None = None, **sampling: Any) -> dict[str, Any]:
    body = {
        "input_ids": ids,
        "sampling_params": {"temperature": 1.0, "max_new_tokens": 16, "ignore_eos": True, **sampling},
        "return_logprob": True,
        **({"rid": rid} if rid else {}),
    }
    async with Http(silence_s=120.0) as http:
        answer = await http.call("POST", f"{url}/generate", json=body, headers={ROUTING_KEY: "session"})
    assert answer.is_ok, answer.excerpt()
    return answer.json()


async def slow_down(control: EngineControl, seconds: float | None) -> None:
    """Have the scheduler sleep before every forward pass, so that a request is still running when it is looked at."""
    async with Http(silence_s=5.0) as http:
        await http.call("POST", f"{control.url}/slow_down", json={"forward_sleep_time": seconds})


async def running(control: EngineControl, count: int) -> None:
    """Wait until `count` requests run."""
    while (await control.loads())[0].num_running < count:
        await asyncio.sleep(0.05)


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


async def test_logprobs_of_sampled_tokens_agree_with_transformers_in_float32(server: EngineServer, model_path: Path):
    import torch
    from transformers import Qwen3ForCausalLM

    answers = await asyncio.gather(
        *(generate(server.url, ids, temperature=temperature) for ids in PROMPTS for temperature in (1.0, 0.5))
    )
    model = Qwen3ForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    gaps: list[float] = []
    for answer, (ids, temperature) in zip(answers, [(i, t) for i in PROMPTS for t in (1.0, 0.5)], strict=True):
        sampled = [token for _, token, _ in answer["meta_info"]["output_token_logprobs"]]
        assert sampled == answer["output_ids"]
        assert len(sampled) == 16
        with torch.no_grad():
            logits = model(torch.tensor([ids + sampled])).logits[0, len(ids) - 1 : -1] / temperature
        expected = torch.log_softmax(logits, -1)[torch.arange(16), torch.tensor(sampled)]
        got = torch.tensor([logprob for logprob, _, _ in answer["meta_info"]["output_token_logprobs"]])
        gaps.append((got - expected).abs().max().item())
    assert max(gaps) <= MAX_GAP


async def test_weights_of_another_folder_are_sampled_from_and_named_by_their_version(
    server: EngineServer, control: EngineControl, model_path: Path, tmp_path: Path
):
    import torch
    from transformers import Qwen3ForCausalLM

    before = await generate(server.url, PROMPTS[1], temperature=0.0)
    model = Qwen3ForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.neg_()
    model.save_pretrained(tmp_path)
    try:
        await control.load_weights(tmp_path, version=9)
        answer = await generate(server.url, PROMPTS[1], temperature=0.0)
    finally:
        await control.load_weights(model_path, version=0)
    with torch.no_grad():
        expected = model(torch.tensor([PROMPTS[1]])).logits[0, -1].argmax().item()
    assert answer["output_ids"][0] == expected
    assert answer["output_ids"] != before["output_ids"]
    assert answer["meta_info"]["weight_versions"] == [{"version": "9", "start": 0, "end": 16}]
    assert (await generate(server.url, PROMPTS[1], temperature=0.0))["output_ids"] == before["output_ids"]


async def test_the_first_weights_are_version_0_and_every_token_says_so(server: EngineServer, control: EngineControl):
    assert await control.weight_version() == 0
    answer = await generate(server.url, PROMPTS[0])
    assert answer["meta_info"]["weight_versions"] == [{"version": "0", "start": 0, "end": 16}]


async def test_health_ready_loads_and_info_of_an_idle_engine(control: EngineControl):
    assert await control.health()
    assert await control.ready()
    assert await control.probe()
    assert [(load.num_running, load.num_waiting) for load in await control.loads()] == [(0, 0)]
    assert (await control.server_info())["version"] == "0.5.23"


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_a_paused_request_goes_on_under_the_new_version(server: EngineServer, control: EngineControl, mode: Any):
    await slow_down(control, 0.02)
    early = asyncio.create_task(generate(server.url, PROMPTS[0], max_new_tokens=64))
    await running(control, 1)
    await control.pause(mode)
    assert await control.health()
    assert not await control.ready()
    late = asyncio.create_task(generate(server.url, PROMPTS[1]))
    if mode == "retract":
        await control.flush_cache()
    else:
        with pytest.raises(EngineError, match=r"/flush_cache answered 400: .*Flush cache failed"):
            await control.flush_cache()
    await control.set_weight_version(1)
    assert not early.done()
    assert not late.done()
    await slow_down(control, None)
    await control.resume()
    first, second = await asyncio.gather(early, late)
    spans = first["meta_info"]["weight_versions"]
    assert [span["version"] for span in spans] == ["0", "1"]
    assert (spans[0]["start"], spans[-1]["end"], len(first["output_ids"])) == (0, 64, 64)
    assert first["meta_info"]["num_retractions"] == (1 if mode == "retract" else 0)
    assert [span["version"] for span in second["meta_info"]["weight_versions"]] == ["1"]


async def test_pause_by_abort_answers_with_the_tokens_so_far(server: EngineServer, control: EngineControl):
    await slow_down(control, 0.02)
    request = asyncio.create_task(generate(server.url, PROMPTS[0], max_new_tokens=1500))
    await running(control, 1)
    await control.pause("abort")
    answer = await request
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert 0 < len(answer["output_ids"]) < 1500
    assert len(answer["meta_info"]["output_token_logprobs"]) == len(answer["output_ids"])


async def test_abort_ends_the_named_request_alone(server: EngineServer, control: EngineControl):
    await slow_down(control, 0.02)
    requests = [
        asyncio.create_task(generate(server.url, PROMPTS[0], rid=rid, max_new_tokens=60)) for rid in ("one", "two")
    ]
    await running(control, 2)
    await control.abort("one")
    await control.abort("nobody")
    one, two = await asyncio.gather(*requests)
    assert one["meta_info"]["finish_reason"]["type"] == "abort"
    assert two["meta_info"]["finish_reason"] == {"type": "length", "length": 60}


async def test_through_the_router_a_request_and_its_answer_are_complete(server: EngineServer, tmp_path: Path):
    router = Router(log_path=tmp_path / "router.log")
    try:
        await asyncio.to_thread(router.start, [server.url])
        answer = await generate(router.url, PROMPTS[0], rid="through-the-router", max_new_tokens=5)
        direct = await generate(server.url, PROMPTS[0], rid="direct", max_new_tokens=5)
    finally:
        await asyncio.to_thread(router.stop)
    assert answer["meta_info"]["id"] == "through-the-router"
    assert answer["meta_info"].keys() == direct["meta_info"].keys()
    assert answer["meta_info"]["output_token_logprobs_length"] == 5


async def test_a_client_that_leaves_the_router_frees_the_engine(
    server: EngineServer, control: EngineControl, tmp_path: Path
):
    await slow_down(control, 0.02)
    router = Router(log_path=tmp_path / "router.log")
    try:
        await asyncio.to_thread(router.start, [server.url])
        request = asyncio.create_task(generate(router.url, PROMPTS[0], max_new_tokens=1500))
        await running(control, 1)
        request.cancel()
        async with asyncio.timeout(20):
            while (await control.loads())[0].num_running:
                await asyncio.sleep(0.05)
    finally:
        await asyncio.to_thread(router.stop)


class Swallowing(SGLangEngine):
    """Loses the first sending of one request, as a router does that dies with it."""

    def __init__(self, url: str, *, rid: str) -> None:
        super().__init__(url)
        self.lost: list[str] = []
        self._rid = rid

    async def generate(self, request: GenerateRequest) -> Generation:
        if request.rid == self._rid and not self.lost:
            self.lost.append(request.rid)
            await asyncio.Event().wait()
        return await super().generate(request)


async def test_a_swallowed_request_is_found_among_running_ones_which_go_on(
    server: EngineServer, control: EngineControl
):
    async def turn(rid: str) -> Generation:
        asked = GenerateRequest(
            rid=rid, session_id=rid, input_ids=np.array([5, 6, 7]), sampling=Sampling(), max_new_tokens=60
        )
        return join([piece async for piece in run_turn(engine, asked, stream=False)])

    await slow_down(control, 0.1)
    inner = Swallowing(server.url, rid="r1")
    engine = WatchedEngine(inner, interval_s=0.2, patience_s=1.0, answer_s=3.0)
    turns = [asyncio.create_task(turn(f"r{i}")) for i in range(4)]
    await running(control, 3)
    assert await inner.num_known() == 3
    await control.pause("retract")
    assert await inner.num_known() is None
    await control.resume()
    made = await asyncio.gather(*turns)
    assert inner.lost == ["r1"]
    assert engine.counts().swallowed == 1
    assert all(len(generation.output_ids) == 60 for generation in made)
    assert all(generation.finish_reason is FinishReason.LENGTH for generation in made)
    await engine.aclose()


def test_stop_leaves_no_process_and_no_file(server: EngineServer):
    members = server.process.members()
    shared = {path for pid in members for path in mapped(pid) if path.startswith("/dev/shm/sglang")}
    assert len(members) >= 4  # guard, HTTP server, scheduler, detokenizer
    assert shared
    began = time.monotonic()
    server.stop()
    assert time.monotonic() - began < 10
    assert alive(members) == []
    assert not any(Path(path).exists() for path in shared)


def mapped(pid: int) -> set[str]:
    return {region.path for region in psutil.Process(pid).memory_maps()}


@pytest.mark.slow
def test_kill_9_of_the_owner_leaves_no_server_of_spawned_processes(model_path: Path, tmp_path: Path):
    source = f"""
    import sys, time
    from pathlib import Path
    from miles_rollout.engines import EngineConfig, EngineServer
    config = EngineConfig(device="cpu", options={OPTIONS!r}, env={{"MILES_SGLANG_START_METHOD": "spawn"}})
    server = EngineServer(config, model_path={str(model_path)!r}, log_path=Path({str(tmp_path / "engine.log")!r}))
    server.start()
    server.wait_ready()
    print(*server.process.members(), flush=True)
    time.sleep(600)
    """
    owner = subprocess.Popen([sys.executable, "-c", textwrap.dedent(source)], stdout=subprocess.PIPE, text=True)
    with owner:
        assert owner.stdout is not None
        members = [int(pid) for pid in owner.stdout.readline().split()]
        assert len(alive(members)) >= 4
        owner.kill()
        eventually(lambda: not alive(members))
    assert "starting the engine's processes by spawn" in (tmp_path / "engine.log").read_text()


def eventually(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)
