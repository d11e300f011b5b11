"""Whatever is sent, the server answers with a status of its own, goes on, and shows nobody another's session."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from typing import Any

import httpx
import hypothesis
import pytest
import schemathesis
from hostile import Attack, attacks
from miles_tito import Sampling, Tokenizer, create_app
from miles_tito.server.app import document
from miles_tito.testing import ScriptedEngine

SECRET = "what only the owner said"
ATTACKS = 600


@pytest.fixture
async def http(tokenizer: Tokenizer) -> AsyncIterator[httpx.AsyncClient]:
    """A server called in this process, so that an exception in it fails the test."""
    app = create_app(
        engine=ScriptedEngine(lambda _: "fine", tokenizer=tokenizer),
        tokenizer=tokenizer,
        family="auto",
        model="m",
        max_context=4000,
        default_sampling=Sampling(max_tokens=8),
    )
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server", timeout=30) as client:
            yield client


async def opened(http: httpx.AsyncClient, session_id: str) -> str:
    answer = await http.post("/sessions", json={"session_id": session_id})
    return answer.json()["api_key"]


async def send(http: httpx.AsyncClient, attack: Attack) -> httpx.Response:
    headers = [(name.encode(), value.encode("latin-1", "replace")) for name, value in attack.headers.items()]
    return await http.request(attack.method, attack.path, headers=headers, content=attack.body)


async def test_hostile_requests_neither_crash_the_server_nor_reach_a_foreign_session(http: httpx.AsyncClient):
    owner, own = await opened(http, "victim"), await opened(http, "attacker")
    body = {"messages": [{"role": "user", "content": SECRET}]}
    said = await http.post(
        "/sessions/victim/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {owner}"}
    )
    assert said.status_code == 200
    seen: set[int] = set()
    for attack in itertools.islice(attacks(0, session="victim", keys=[own]), ATTACKS):
        answer = await send(http, attack)
        seen.add(answer.status_code)
        assert answer.status_code < 500, f"{attack}: {answer.text[:500]}"
        assert SECRET not in answer.text
        if attack.path.startswith("/sessions/victim") and attack.method != "HEAD":
            assert answer.status_code in (401, 404, 405), f"{attack}: {answer.text[:500]}"
        if answer.status_code >= 400 and attack.method != "HEAD":
            assert answer.json()["error"]["message"], f"{attack}: {answer.text[:500]}"
    assert {200, 400, 401, 404} <= seen
    nodes = (await http.get("/sessions/victim", headers={"Authorization": f"Bearer {owner}"})).json()["nodes"]
    assert len(nodes) == 1, "nothing was added to the session"


async def test_hostile_requests_to_ones_own_session_leave_it_readable(http: httpx.AsyncClient):
    key = await opened(http, "own")
    seen: set[int] = set()
    for attack in itertools.islice(attacks(1, session="own", keys=[key]), ATTACKS):
        answer = await send(http, attack)
        seen.add(answer.status_code)
        assert answer.status_code < 500, f"{attack}: {answer.text[:500]}"
    assert {200, 400} <= seen
    answer = await http.post("/sessions/own/samples", json={"reward": 1.0}, headers={"Authorization": f"Bearer {key}"})
    assert answer.status_code == 200
    samples = answer.json()["samples"]
    assert samples
    assert {sample["loss_denominator"] for sample in samples} == {sum(sum(s["loss_mask"]) for s in samples)}


async def test_the_document_names_every_route(http: httpx.AsyncClient):
    assert (await http.get("/openapi.json")).json()["paths"] == document()["paths"]
    app: Any = http._transport.app  # type: ignore[attr-defined]
    served = {route.path for route in app.routes} - {"/", "/v1", "/sessions/{session_id}/v1", "/openapi.json"}
    assert served == set(document()["paths"])


SCHEMA = schemathesis.openapi.from_dict(document())


@pytest.mark.parametrize("operation", [op.ok() for op in SCHEMA.get_all_operations()], ids=lambda op: op.label)
async def test_what_the_document_allows_is_answered(operation: Any, http: httpx.AsyncClient):
    key = await opened(http, "s")
    cases: list[Any] = []

    @hypothesis.settings(max_examples=25, deadline=None, database=None, derandomize=True)
    @hypothesis.given(case=operation.as_strategy())
    def collect(case: Any) -> None:
        cases.append(case)

    collect()
    for case in cases:
        body = case.as_transport_kwargs(base_url="http://server").get("json", {})
        path = operation.path.replace("{session_id}", "s")
        options: dict[str, Any] = {"json": body} if operation.method == "post" else {"params": case.query}
        if not (await http.get("/sessions/s", headers={"x-api-key": key})).is_success:
            key = await opened(http, "s")  # the last request closed it
        answer = await http.request(operation.method, path, headers={"Authorization": f"Bearer {key}"}, **options)
        if "did not keep to the form" in answer.text:  # the scripted engine knows no grammar
            assert answer.status_code == 502
            continue
        assert answer.status_code < 500, f"{body}: {answer.text[:500]}"
