"""`miles-tito serve` before a real SGLang server: what eight tool sessions recorded, scored again by Transformers."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import httpx
import numpy as np
import pytest
from miles_rollout.engines import EngineConfig, EngineServer
from miles_tito import Policy, Sample, Sampling, SessionClient
from miles_weightsync import PushConfig, Shard
from tool_models import TOOL, TURNS, make_versions

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed"),
]

SESSIONS = 8
KINDS = {"qwen3": False, "qwen3-moe": True}
"""Whether the model has experts."""
SAMPLING = Sampling(temperature=0.9, max_tokens=64)
MAX_GAP = 1e-4


@dataclass(frozen=True)
class Served:
    """An engine with the first of two versions of a model."""

    url: str
    folders: tuple[Path, Path]
    experts: bool


@pytest.fixture(scope="module", params=KINDS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    experts = KINDS[request.param]
    path = tmp_path_factory.mktemp(request.param)
    folders = make_versions(path, experts=experts)
    options = {"enable-return-routed-experts": experts}
    config = EngineConfig(device="cpu", context_length=2048, max_total_tokens=16384, options=options)
    with EngineServer(config, model_path=folders[0], log_path=path / "engine.log") as server:
        yield Served(server.url, folders, experts)


@contextlib.asynccontextmanager
async def session_server(served: Served) -> AsyncIterator[SessionClient]:
    command = [
        "serve",
        "--engine",
        served.url,
        "--tokenizer",
        str(served.folders[0]),
        "--family",
        "tiny",
        "--port",
        "0",
    ]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "miles_tito", *command, *(["--routed-experts"] if served.experts else [])),
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout
    try:
        words = (await process.stdout.readline()).decode().split()
        assert words, "the session server did not start"
        client = SessionClient([words[2]])
        yield client
        await client.aclose()
    finally:
        process.terminate()
        await process.wait()


async def use_tools(http: httpx.AsyncClient, policy: Policy, *, stream: bool) -> int:
    """One agent; how many calls its model made."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "what is there?"}]
    num_calls = 0
    for turn in range(TURNS):
        body = {"messages": messages, "tools": [TOOL], "stream": stream}
        reply = await (_streamed if stream else _whole)(http, policy, body)
        calls = reply.get("tool_calls", [])
        messages.append(reply)
        messages += [{"role": "tool", "tool_call_id": c["id"], "content": f"nothing at {turn}"} for c in calls]
        if not calls:
            messages.append({"role": "user", "content": "what is there?"})
        num_calls += len(calls)
    return num_calls


async def _whole(http: httpx.AsyncClient, policy: Policy, body: dict[str, Any]) -> dict[str, Any]:
    answer = await http.post(f"{policy.base_url}/chat/completions", json=body, headers=_auth(policy))
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]


async def _streamed(http: httpx.AsyncClient, policy: Policy, body: dict[str, Any]) -> dict[str, Any]:
    reply: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": []}
    url = f"{policy.base_url}/chat/completions"
    async with http.stream("POST", url, json=body, headers=_auth(policy)) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                delta = json.loads(line[6:])["choices"][0]["delta"]
                reply["content"] += delta.get("content", "")
                reply["tool_calls"] += delta.get("tool_calls", [])
    return reply if reply["tool_calls"] else {"role": "assistant", "content": reply["content"]}


def _auth(policy: Policy) -> dict[str, str]:
    return {"Authorization": f"Bearer {policy.api_key}"}


async def push(url: str, folder: Path, pause: Literal["retract", "abort"]) -> None:
    """Weights of `folder` as version 1."""
    from miles_weightsync import Pusher
    from safetensors.torch import load_file

    tensors = load_file(folder / "model.safetensors")
    whole = {name: tuple((0, size) for size in tensor.shape) for name, tensor in tensors.items()}
    shards = [Shard(n, tuple(t.shape), t.dtype, whole[n], t) for n, t in tensors.items()]
    config = PushConfig(pause=pause, dtype="keep", timeout_s=60)
    with Pusher([url], config=config) as pusher:
        await asyncio.to_thread(pusher.push, shards, version=1)


def scored(samples: list[Sample], folder: Path) -> list[tuple[np.ndarray, list[np.ndarray]]]:
    """Of each sample: log-probs [T] of its tokens by the weights of `folder`, and each layer's experts [T, 2]."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    results: list[tuple[np.ndarray, list[np.ndarray]]] = []
    for sample in samples:
        ids = torch.from_numpy(sample.tokens.astype(np.int64))
        with torch.no_grad():
            out = model(ids[None], **({"output_router_logits": True} if sample.routed_layers else {}))
        logprobs = torch.log_softmax(out.logits[0].double() / sample.temperature, -1)
        own = torch.cat([torch.zeros(1), logprobs[:-1].gather(1, ids[1:, None])[:, 0]])
        layers = [
            logits.reshape(len(ids), -1).topk(2, -1).indices.numpy() for logits in getattr(out, "router_logits", ())
        ]
        results.append((own.numpy(), layers))
    return results


def check_experts(sample: Sample, by_version: list[list[np.ndarray]]) -> None:
    """A row for every token but the last; each names the experts that one of the two versions chooses."""
    assert sample.routed_experts is not None
    assert sample.routed_mask is not None
    assert np.flatnonzero(~sample.routed_mask).tolist() == [len(sample.tokens) - 1]
    for place in range(len(sample.routed_layers)):
        ours = np.sort(sample.routed_experts[:-1, place])
        agrees = [(ours == np.sort(layers[place][:-1])).all(-1) for layers in by_version]
        assert (agrees[0] | agrees[1]).mean() >= 0.99  # ties in float32 may fall either way
        late = sample.tokens.size - 1 - 20
        assert agrees[1][late:].mean() >= 0.95, "the last rows are the new weights'"


async def test_samples_of_sessions_that_ran_through_a_weight_update_are_what_transformers_computes(served: Served):
    limits = httpx.Limits(max_connections=2 * SESSIONS)
    async with (
        session_server(served) as sessions,
        httpx.AsyncClient(timeout=120, trust_env=False, limits=limits) as http,
    ):
        policies = [await sessions.open(f"s{n}", sampling=SAMPLING) for n in range(SESSIONS)]
        await http.post(f"{served.url}/slow_down", json={"forward_sleep_time": 0.02})
        agents = [asyncio.create_task(use_tools(http, p, stream=n % 2 == 1)) for n, p in enumerate(policies)]
        while any([await _num_turns(http, policy) < 1 for policy in policies]):
            await asyncio.sleep(0.05)
        # A request that is taken back is read again; one that is aborted is continued by the session server.
        pause = "abort" if served.experts else "retract"
        await push(served.url, served.folders[1], pause)
        await http.post(f"{served.url}/slow_down", json={"forward_sleep_time": None})
        num_calls = sum(await asyncio.gather(*agents))
        samples: list[Sample] = []
        for policy in policies:
            found, dropped = await sessions.samples(policy.session_id, reward=1.0)
            samples += found
            assert not dropped
    assert num_calls > SESSIONS * TURNS / 2, "too few turns called a tool for this to be about tools"
    check(samples, [scored(samples, folder) for folder in served.folders], experts=served.experts)


async def test_a_forced_form_is_kept_to_and_stays_out_of_training(served: Served):
    schema = {
        "type": "object",
        "properties": {"way": {"enum": ["north", "south"]}, "steps": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["way", "steps"],
        "additionalProperties": False,
    }
    as_json = {"type": "json_schema", "json_schema": {"name": "walk", "schema": schema}}
    user = {"role": "user", "content": "which way?"}
    async with session_server(served) as sessions, httpx.AsyncClient(timeout=120, trust_env=False) as http:
        policy = await sessions.open("forced", sampling=replace(SAMPLING, max_tokens=300))
        reply = await _whole(http, policy, {"messages": [user], "response_format": as_json})
        other = {"type": "function", "function": {"name": "walk", "parameters": schema}}
        asked = {
            "messages": [user],
            "tools": [TOOL, other],
            "tool_choice": {"type": "function", "function": {"name": "walk"}},
        }
        called = await _streamed(http, policy, {**asked, "stream": True})
        samples, dropped = await sessions.samples("forced", reward=1.0)
    walked = json.loads(reply["content"])
    assert walked["way"] in ("north", "south")
    assert 0 <= walked["steps"] <= 9
    [call] = called["tool_calls"]
    assert call["function"]["name"] == "walk"
    assert set(json.loads(call["function"]["arguments"])) == {"way", "steps"}
    assert samples == []
    assert [entry["why"].split(":")[0] for entry in dropped] == ["forced", "forced"]


async def _num_turns(http: httpx.AsyncClient, policy: Policy) -> int:
    url = policy.base_url.removesuffix("/v1")
    return (await http.get(url, headers=_auth(policy))).json()["num_turns"]


def check(samples: list[Sample], by_version: list[list[tuple[np.ndarray, list[np.ndarray]]]], *, experts: bool) -> None:
    assert len(samples) == SESSIONS
    num_crossed = 0
    for sample, old, new in zip(samples, *by_version, strict=True):
        versions = np.full(len(sample.tokens), -1)
        for span in sample.versions:
            versions[span.start : span.end] = span.version
        assert np.array_equal(versions >= 0, sample.loss_mask), "spans cover exactly what was sampled"
        sampled = versions[sample.loss_mask]
        assert (np.diff(sampled) >= 0).all()
        assert set(sampled) == {0, 1}
        first_new = int(np.flatnonzero(versions == 1)[0])
        num_crossed += bool(sample.loss_mask[first_new - 1])
        expected = np.where(versions == 1, new[0], old[0])
        assert np.abs(sample.logprobs - expected)[sample.loss_mask].max() <= MAX_GAP
        # The other version's weights do not explain them: the spans are not there by chance.
        assert np.abs(sample.logprobs - new[0])[versions == 0].max() > 100 * MAX_GAP
        assert np.abs(sample.logprobs - old[0])[versions == 1].max() > 100 * MAX_GAP
        if experts:
            check_experts(sample, [old[1], new[1]])
    assert num_crossed >= SESSIONS / 2, "the update came between the turns, not into them"
