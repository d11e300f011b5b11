"""Several engines behind one server."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from miles_tito import EngineError, Sampling, SessionClient, Tokenizer, create_app
from miles_tito.engine.generation import EnginePool
from miles_tito.testing import ScriptedEngine


async def test_sessions_spread_over_engines_and_each_keeps_to_its_own(tokenizer: Tokenizer, served: Any):
    engines = [ScriptedEngine(lambda _: "x", tokenizer=tokenizer) for _ in range(2)]
    app = create_app(engine=EnginePool(engines), tokenizer=tokenizer, family="auto", model="m", max_context=500)
    async with served(app) as url:
        client = SessionClient([url])

        async with httpx.AsyncClient(trust_env=False) as http:
            for n in range(12):
                policy = await client.open(f"s{n}", sampling=Sampling())
                auth = {"Authorization": f"Bearer {policy.api_key}"}
                for stream in (False, True):
                    body = {"messages": [{"role": "user", "content": f"q{stream}"}], "stream": stream}
                    answer = await http.post(f"{policy.base_url}/chat/completions", json=body, headers=auth)
                    assert answer.status_code == 200
        await client.aclose()
    asked = [{request.session_id for request in engine.requests} for engine in engines]
    assert asked[0] & asked[1] == set()
    assert min(map(len, asked)) > 0
    assert sum(len(engine.requests) for engine in engines) == 24


async def test_an_abort_reaches_the_engine_that_runs_the_call(tokenizer: Tokenizer):
    aborted: list[str] = []

    class Engine(ScriptedEngine):
        async def abort(self, rid: str) -> None:
            aborted.append(rid)

    await EnginePool([Engine([]), Engine([])]).abort("s-1")
    assert aborted == ["s-1", "s-1"]


def test_a_pool_of_no_engine_is_refused():
    with pytest.raises(EngineError, match="at least one engine"):
        EnginePool([])


async def test_a_client_collects_samples_and_learns_what_was_left_out(tokenizer: Tokenizer, served: Any):
    engine = ScriptedEngine(["one", "two"], tokenizer=tokenizer)
    app = create_app(engine=engine, tokenizer=tokenizer, family="auto", model="m", max_context=500)
    async with served(app) as url:
        client = SessionClient([url])
        policy = await client.open("s", sampling=Sampling())

        async with httpx.AsyncClient(trust_env=False) as http:
            body = {"messages": [{"role": "user", "content": "q"}]}
            for _ in range(2):
                auth = {"Authorization": f"Bearer {policy.api_key}"}
                await http.post(f"{policy.base_url}/chat/completions", json=body, headers=auth)
        [sample], [left_out] = await client.samples("s", reward=0.5, metadata={"task": 1})
        await client.aclose()
    assert (sample.reward, sample.advantage, sample.metadata["task"]) == (0.5, 0.5, 1)
    assert (left_out["node"], left_out["why"].split(":")[0]) == (0, "retry")
