"""The chat server as agents meet it: OpenAI's shapes, strict requests, and everything recorded."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import numpy as np
import pytest
from miles_tito import (
    EngineError,
    FinishReason,
    Sampling,
    SessionClient,
    SessionError,
    Tokenizer,
    Trajectory,
    TrajectoryKind,
    create_app,
)
from miles_tito.records import encoding
from miles_tito.testing import Reply, ScriptedEngine

OpenChat = Callable[..., Any]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def recorded(chat: Any, picker: str = "default") -> tuple[Trajectory, ...]:
    url = f"{chat.server}/sessions/{chat.id}/trajectories?picker={picker}"
    response = await chat.http.get(url, headers=chat.auth)
    assert response.status_code == 200, response.text
    return encoding.decode_many(response.content, Trajectory)


async def events(chat: Any, messages: list[dict[str, Any]], **fields: Any) -> AsyncIterator[dict[str, Any]]:
    body = {"messages": messages, "stream": True, **fields}
    async with chat.http.stream("POST", f"{chat.url}/chat/completions", json=body, headers=chat.auth) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                return
            if line:
                yield json.loads(line.removeprefix("data: "))


async def test_a_tool_loop_is_recorded_as_one_exact_trajectory(tokenizer: Tokenizer, open_chat: OpenChat):
    engine = ScriptedEngine([f"let me see\n{CALL}", "it is é 漢"], tokenizer=tokenizer, version=4)
    async with open_chat(engine, sampling={"temperature": 0.7, "max_tokens": 200}) as chat:
        messages = [user("q")]
        answer = await chat.say(messages, tools=TOOLS)
        [choice] = answer["choices"]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] == "let me see"
        [call] = choice["message"]["tool_calls"]
        assert call["type"] == "function"
        assert call["function"] == {"name": "f", "arguments": '{"a":1}'}
        messages += [choice["message"], {"role": "tool", "tool_call_id": call["id"], "content": "2 <|im_end|>"}]
        answer = await chat.say(messages, tools=TOOLS)
        assert answer["choices"][0]["message"] == {"role": "assistant", "content": "it is é 漢"}
        assert answer["choices"][0]["finish_reason"] == "stop"
        [trajectory] = await recorded(chat)
    sampled = [np.append(tokenizer.encode(text), 2) for text in (f"let me see\n{CALL}", "it is é 漢")]
    assert trajectory.tokens[trajectory.loss_mask].tolist() == np.concatenate(sampled).tolist()
    assert trajectory.temperature == 0.7
    assert {span.version for span in trajectory.versions} == {4}
    second = engine.requests[1]
    assert second.input_ids.tolist() == trajectory.tokens[: len(second.input_ids)].tolist()
    usage = {"prompt_tokens": len(second.input_ids), "completion_tokens": len(sampled[1])}
    assert {key: answer["usage"][key] for key in usage} == usage
    assert answer["usage"]["total_tokens"] == sum(usage.values())


async def test_a_stream_carries_the_same_answer_in_openai_chunks(tokenizer: Tokenizer, open_chat: OpenChat):
    text = f"<think>\nhm\n</think>\n\nso é\n{CALL}\n{CALL}"
    engine = ScriptedEngine([text, text], tokenizer=tokenizer)
    async with open_chat(engine) as chat:
        whole = (await chat.say([user("q")], tools=TOOLS))["choices"][0]
        chunks = [c async for c in events(chat, [user("q")], tools=TOOLS, stream_options={"include_usage": True})]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert sum("content" in delta for delta in deltas) > 3, "content comes in pieces"
    assert "".join(delta.get("content", "") for delta in deltas) == whole["message"]["content"]
    assert "".join(d.get("reasoning_content", "") for d in deltas) == whole["message"]["reasoning_content"] == "hm"
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert [call["index"] for call in calls] == [0, 1]
    assert [call["function"] for call in calls] == [c["function"] for c in whole["message"]["tool_calls"]]
    assert [c["choices"][0]["finish_reason"] for c in chunks if c["choices"]][-1] == "tool_calls"
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == len(tokenizer.encode(text)) + 1


async def test_a_streamed_reply_with_calls_is_found_again(tokenizer: Tokenizer, open_chat: OpenChat):
    engine = ScriptedEngine([CALL, "two"], tokenizer=tokenizer)
    async with open_chat(engine) as chat:
        calls: list[Any] = []
        async for chunk in events(chat, [user("q")], tools=TOOLS):
            calls += chunk["choices"][0]["delta"].get("tool_calls", [])
        reply = {"role": "assistant", "content": None, "tool_calls": calls}
        await chat.say([user("q"), reply, {"role": "tool", "content": "1"}], tools=TOOLS)
        [trajectory] = await recorded(chat)
    assert trajectory.metadata["num_turns"] == 2


async def test_tokens_are_streamed_while_the_engine_still_samples(tokenizer: Tokenizer, open_chat: OpenChat):
    seen = asyncio.Event()

    async def hold(asked: Any, n: int) -> None:
        if n == 3:
            await seen.wait()

    engine = ScriptedEngine(["abcdefgh"], tokenizer=tokenizer, before_token=hold)
    async with open_chat(engine) as chat:
        text = ""
        async for chunk in events(chat, [user("q")]):
            text += chunk["choices"][0]["delta"].get("content", "")
            if text:
                seen.set()
    assert text == "abcdefgh"


async def test_the_sessions_sampling_wins_and_the_answer_says_so(tokenizer: Tokenizer, open_chat: OpenChat):
    engine = ScriptedEngine(["x"] * 3, tokenizer=tokenizer)
    async with open_chat(engine, sampling={"temperature": 0.7, "max_tokens": 50}) as chat:
        response = await chat.post(
            [user("q")], temperature=0.0, top_p=0.5, seed=3, max_tokens=90, model="gpt-x", frequency_penalty=0
        )
        assert response.headers["x-miles-pinned"] == "temperature,top_p,seed,max_tokens,model"
        assert response.json()["model"] == "policy"
        response = await chat.post([user("q")], temperature=0.7, top_p=1, max_completion_tokens=9)
        assert "x-miles-pinned" not in response.headers
    first, second = engine.requests
    assert first.sampling == Sampling(temperature=0.7, max_tokens=50)
    assert (first.max_new_tokens, second.max_new_tokens) == (50, 9)


REFUSED: dict[str, Any] = {
    "n": 2,
    "frequency_penalty": 0.5,
    "presence_penalty": -1,
    "logit_bias": {"5": 1},
    "logprobs": 1,
    "top_logprobs": 3,
    "response_format": {"type": "grammar"},
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "functions": [],
    "echo": True,
    "best_of": 2,
    "repetition_penalty": 1.1,
    "reasoning_effort": "high",
    "stream_options": {"include_obfuscation": True},
    "max_tokens": 0,
    "temperature": "hot",
    "stop": [""],
    "tools": [{"type": "web_search"}],
    "stream": "yes",
    "stop_token_ids": [-1],
    "chat_template_kwargs": [],
}


@pytest.mark.parametrize("field", REFUSED)
async def test_what_cannot_be_served_is_refused_by_name(field: str, tokenizer: Tokenizer, open_chat: OpenChat):
    engine = ScriptedEngine([], tokenizer=tokenizer)
    async with open_chat(engine) as chat:
        response = await chat.post([user("q")], **{field: REFUSED[field]})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == field
    assert field in error["message"]
    assert error["type"] == "invalid_request_error"
    assert engine.requests == []


BAD_MESSAGES: dict[str, tuple[Any, str]] = {
    "none": ([], "non-empty list"),
    "no object": (["hi"], r"messages\[0\] is a str"),
    "role": ([{"role": "function", "content": "x"}], "role 'function'"),
    "image": (
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]}],
        "takes no images",
    ),
    "an image without a URL": (
        [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
        "is an image without a URL",
    ),
    "unknown field": ([{"role": "user", "content": "x", "weight": 0}], "weight"),
    "arguments": (
        [user("q"), {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
        "is no JSON",
    ),
}


@pytest.mark.parametrize("case", BAD_MESSAGES)
async def test_messages_that_cannot_be_rendered_are_refused(case: str, tokenizer: Tokenizer, open_chat: OpenChat):
    messages, why = BAD_MESSAGES[case]
    async with open_chat(ScriptedEngine([], tokenizer=tokenizer)) as chat:
        response = await chat.post(messages)
    assert response.status_code == 400
    with pytest.raises(ValueError, match=why):
        raise ValueError(response.json()["error"]["message"])


@pytest.mark.parametrize(
    ("opening", "why"),
    [
        ({"sampling": {"tempratur": 1}}, "tempratur"),
        ({"sampling": {"top_p": 2}}, "top_p"),
        ({"tools": [{"a": 3}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 7}}]}, "parameters"),
        ({"ttl_s": -1}, "ttl_s"),
        ({"metadta": {}}, "metadta"),
        ({"family": "llama-9"}, "llama-9"),
    ],
)
async def test_an_opening_that_says_nothing_sensible_is_refused(
    opening: dict[str, Any], why: str, tokenizer: Tokenizer, open_chat: OpenChat
):
    async with open_chat(ScriptedEngine([], tokenizer=tokenizer)) as chat:
        answer = await chat.http.post(f"{chat.server}/sessions", json=opening)
        held = (await chat.http.get(f"{chat.server}/health")).json()
    assert answer.status_code == 400
    assert why in answer.json()["error"]["message"]
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert held["sessions"] == 1


async def test_labels_without_effect_are_accepted(tokenizer: Tokenizer, open_chat: OpenChat):
    engine = ScriptedEngine(["x"], tokenizer=tokenizer)
    async with open_chat(engine) as chat:
        await chat.say(
            [user("q")], user="me", n=1, logprobs=False, stop=None, tools=[], tool_choice="auto", store=False
        )


async def test_a_full_context_is_a_400_with_the_numbers(tokenizer: Tokenizer, open_chat: OpenChat):
    engine = ScriptedEngine([], tokenizer=tokenizer)
    async with open_chat(engine, max_context=30) as chat:
        response = await chat.post([user("long " * 30)])
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "maximum context length is 30 tokens, and the messages take" in error["message"]


async def test_a_long_prompt_encoded_in_a_thread_gives_the_same_ids(tokenizer: Tokenizer, open_chat: OpenChat):
    text = "word é " * 4000
    engine = ScriptedEngine(["x"], tokenizer=tokenizer)
    async with open_chat(engine, max_context=100_000) as chat:
        await chat.say([user(text)])
    expected = tokenizer.encode(tokenizer.render([user(text)], generation_prompt=True))
    assert engine.requests[0].input_ids.tolist() == expected.tolist()


async def test_concurrent_equal_requests_are_separate_branches(tokenizer: Tokenizer, open_chat: OpenChat):
    both = asyncio.Event()

    async def together(asked: Any, n: int) -> None:
        if len(engine.requests) == 2:
            both.set()
        await both.wait()

    engine = ScriptedEngine(["one", "two"], tokenizer=tokenizer, before_token=together)
    async with open_chat(engine) as chat:
        replies = await asyncio.gather(chat.reply([user("q")]), chat.reply([user("q")]))
        trajectories = await recorded(chat)
    assert sorted(reply["content"] for reply in replies) == ["one", "two"]
    assert [t.kind for t in trajectories] == [TrajectoryKind.MAIN, TrajectoryKind.FORK]
    assert [t.id for t in trajectories] == ["s:0", "s:1"]


async def test_a_client_that_leaves_aborts_its_generation_and_records_nothing(
    tokenizer: Tokenizer, open_chat: OpenChat
):
    started, never = asyncio.Event(), asyncio.Event()
    ended = asyncio.Event()

    async def hold(asked: Any, n: int) -> None:
        started.set()
        try:
            await never.wait()
        finally:
            ended.set()

    engine = ScriptedEngine(["one"] * 2, tokenizer=tokenizer, before_token=hold)
    async with open_chat(engine) as chat:
        for stream in (False, True):
            started.clear()
            ended.clear()
            task = asyncio.create_task(chat.post([user("q")], stream=stream))
            await started.wait()
            task.cancel()
            await ended.wait()
        tree = (await chat.http.get(f"{chat.server}/sessions/s", headers=chat.auth)).json()
        assert (tree["num_turns"], tree["num_discarded"], tree["nodes"]) == (0, 2, [])
        assert await recorded(chat) == ()
    assert engine.aborted == [asked.rid for asked in engine.requests]


async def test_an_engine_failure_is_an_error_in_openai_shape_and_the_next_try_is_the_only_record(
    tokenizer: Tokenizer, open_chat: OpenChat
):
    failed = Reply(ids=[5], error=EngineError("the engine is gone", status=500))
    engine = ScriptedEngine([failed, failed, "fine"], tokenizer=tokenizer)
    async with open_chat(engine) as chat:
        for stream in (False, True):
            response = await chat.post([user("q")], stream=stream)
            assert response.status_code == 502
            assert response.json()["error"]["message"] == "the engine is gone"
        await chat.say([user("q")])
        [trajectory] = await recorded(chat)
    assert trajectory.kind is TrajectoryKind.MAIN


async def test_a_finish_by_length_is_reported_as_such(tokenizer: Tokenizer, open_chat: OpenChat):
    engine = ScriptedEngine(["a long answer"], tokenizer=tokenizer)
    async with open_chat(engine) as chat:
        answer = await chat.say([user("q")], max_tokens=3)
        assert answer["choices"][0]["finish_reason"] == "length"
        assert (await recorded(chat))[0].finish_reason is FinishReason.LENGTH


async def test_a_session_is_closed_to_other_keys(tokenizer: Tokenizer, open_chat: OpenChat):
    async with open_chat(ScriptedEngine([], tokenizer=tokenizer)) as chat:
        other = (await chat.http.post(f"{chat.server}/sessions", json={"session_id": "other"})).json()
        foreign = {"Authorization": f"Bearer {other['api_key']}"}
        base = f"{chat.server}/sessions/s"
        answers = [
            await chat.http.get(base, headers=foreign),
            await chat.http.get(f"{base}/trajectories", headers=foreign),
            await chat.http.delete(base, headers=foreign),
            await chat.http.post(f"{base}/v1/chat/completions", json={}, headers=foreign),
            await chat.http.post(f"{base}/v1/chat/completions", json={}),
            await chat.http.get(f"{chat.server}/sessions/absent", headers=foreign),
        ]
        assert {answer.status_code for answer in answers} == {401}
        assert len({answer.json()["error"]["code"] for answer in answers}) == 1


async def test_a_server_key_opens_and_reads_every_session(tokenizer: Tokenizer, served: Any):
    engine = ScriptedEngine(["x"], tokenizer=tokenizer)
    app = create_app(engine=engine, tokenizer=tokenizer, family="auto", model="m", max_context=500, api_key="operator")
    async with served(app) as url:
        stranger = SessionClient([url])
        with pytest.raises(SessionError, match="needs the server's API key"):
            await stranger.open("s", sampling=Sampling())
        opener, reader = SessionClient([url], api_key="operator"), SessionClient([url], api_key="operator")
        policy = await opener.open("s", sampling=Sampling(temperature=0.5), metadata={"task": 3})
        assert policy.base_url == f"{url}/sessions/s/v1"
        assert policy.api_key != "operator"
        async with httpx.AsyncClient(trust_env=False) as http:
            body = {"messages": [user("q")]}
            auth = {"Authorization": f"Bearer {policy.api_key}"}
            assert (await http.post(f"{policy.base_url}/chat/completions", json=body, headers=auth)).status_code == 200
            assert (await http.get(f"{policy.base_url}/models", headers=auth)).json()["data"][0]["id"] == "m"
        [trajectory] = await reader.trajectories("s")
        assert (trajectory.temperature, trajectory.metadata["task"]) == (0.5, 3)
        await reader.close("s")
        await reader.close("s")
        with pytest.raises(SessionError) as caught:
            await opener.trajectories("s")
        assert caught.value.status == 404
        for client in (stranger, opener, reader):
            await client.aclose()


async def test_a_client_without_a_server_key_reads_and_closes_its_own_sessions_twice(tokenizer: Tokenizer, served: Any):
    app = create_app(engine=ScriptedEngine([]), tokenizer=tokenizer, family="auto", model="m", max_context=500)
    async with served(app) as url:
        client = SessionClient([url])
        await client.open("s", sampling=Sampling())
        assert await client.trajectories("s") == ()
        with pytest.raises(SessionError, match="open already") as caught:
            await client.open("s", sampling=Sampling())
        assert caught.value.status == 409
        await client.close("s")
        await client.close("s")
        await client.open("s", sampling=Sampling())
        await client.aclose()


async def test_sessions_spread_over_servers_and_stay_where_they_are(tokenizer: Tokenizer, served: Any):
    def app() -> Any:
        return create_app(engine=ScriptedEngine([]), tokenizer=tokenizer, family="auto", model="m", max_context=500)

    async with served(app()) as one, served(app()) as two, httpx.AsyncClient(trust_env=False) as http:
        client = SessionClient([one, two])
        for n in range(16):
            await client.open(f"s{n}", sampling=Sampling())
            await client.trajectories(f"s{n}")
        counts = [(await http.get(f"{url}/health")).json()["sessions"] for url in (one, two)]
        await client.aclose()
    assert sum(counts) == 16
    assert min(counts) > 0


async def test_a_client_without_a_server_says_which_url_did_not_answer():
    client = SessionClient(["http://127.0.0.1:9"], retry_for_s=0.1)
    with pytest.raises(SessionError, match=r"POST http://127\.0\.0\.1:9/sessions got no answer"):
        await client.open("s", sampling=Sampling())
    await client.aclose()


class Breaking:
    """Serves every request, and breaks the connection in the middle of the first answers."""

    def __init__(self, app: Any, *, times: int) -> None:
        self._app = app
        self._left = times

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or not self._left:
            await self._app(scope, receive, send)
            return
        self._left -= 1

        async def half(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [(b"content-length", b"10000")]}
            await send({**message, "more_body": True} if message["type"] == "http.response.body" else message)

        await self._app(scope, receive, half)
        raise ConnectionResetError("as when the server is killed")


async def test_a_call_whose_connection_breaks_is_sent_again_and_an_opening_served_twice_counts_once(
    tokenizer: Tokenizer, served: Any
):
    app = create_app(
        engine=ScriptedEngine([]), tokenizer=tokenizer, family="auto", model="m", max_context=500, api_key="operator"
    )
    async with served(Breaking(app, times=2)) as url, httpx.AsyncClient(trust_env=False) as http:
        client = SessionClient([url], api_key="operator")
        policy = await client.open("s", sampling=Sampling())
        assert (await http.get(f"{url}/health")).json()["sessions"] == 1
        models = await http.get(f"{policy.base_url}/models", headers={"Authorization": f"Bearer {policy.api_key}"})
        assert models.status_code == 200
        with pytest.raises(SessionError, match="open already"):
            await client.open("s", sampling=Sampling())
        await client.close("s")
        await client.aclose()


async def test_closing_a_session_ends_what_runs_in_it(tokenizer: Tokenizer, open_chat: OpenChat):
    started, never = asyncio.Event(), asyncio.Event()

    async def hold(asked: Any, n: int) -> None:
        started.set()
        await never.wait()

    engine = ScriptedEngine(["one"], tokenizer=tokenizer, before_token=hold)
    async with open_chat(engine) as chat:
        task = asyncio.create_task(chat.post([user("q")]))
        await started.wait()
        assert (await chat.http.delete(f"{chat.server}/sessions/s", headers=chat.auth)).status_code == 204
        response = await task
        assert response.status_code == 410
        assert response.json()["error"]["code"] == "session_closed"
    assert engine.aborted == [engine.requests[0].rid]


async def test_samples_come_in_the_form_that_was_asked_for(tokenizer: Tokenizer, open_chat: OpenChat):
    async with open_chat(ScriptedEngine(["one"], tokenizer=tokenizer)) as chat:
        await chat.say([user("q")])

        async def samples(accept: str) -> httpx.Response:
            url = f"{chat.server}/sessions/s/samples"
            return await chat.http.post(url, json={"reward": 0.5}, headers={**chat.auth, "accept": accept})

        [packed], _ = encoding.decode_samples((await samples("application/msgpack")).content)
        [tensors] = encoding.samples_from_safetensors((await samples("application/x-safetensors")).content)
        [plain] = (await samples("*/*")).json()["samples"]
        assert packed.tokens.tolist() == tensors.tokens.tolist() == plain["tokens"]
        assert (packed.reward, packed.advantage, packed.loss_denominator) == (0.5, 0.5, 4)


SAMPLES: dict[str, tuple[dict[str, Any], int, str]] = {
    "no reward yet": ({}, 200, ""),
    "a limit": ({"outcome": "policy_limit", "reward": 0.25}, 200, ""),
    "a failure": ({"outcome": "infra_abort"}, 422, "carries no reward"),
    "a failure with a score": ({"outcome": "infra_abort", "reward": 0.0}, 422, "a failure is not a score"),
    "a grade without reward": ({"outcome": "graded"}, 422, "needs a finite reward"),
    "a field that does not exist": ({"rewards": 1}, 400, "rewards"),
    "a picker that does not exist": ({"picker": "best"}, 400, "known: default, leaves, all"),
    "no room": ({"max_tokens": 0}, 400, "max_tokens"),
}


@pytest.mark.parametrize("case", SAMPLES)
async def test_samples_take_what_is_known_and_refuse_a_failure_as_a_score(
    case: str, tokenizer: Tokenizer, open_chat: OpenChat
):
    grade, status, why = SAMPLES[case]
    async with open_chat(ScriptedEngine(["one"], tokenizer=tokenizer)) as chat:
        await chat.say([user("q")])
        answer = await chat.http.post(f"{chat.server}/sessions/s/samples", json=grade, headers=chat.auth)
    assert answer.status_code == status
    if status == 200:
        [sample] = answer.json()["samples"]
        assert sample["reward"] == grade.get("reward")
        assert answer.json()["dropped"] == []
    else:
        assert why in answer.json()["error"]["message"]


async def test_what_no_sample_trains_is_named_with_its_reason(tokenizer: Tokenizer, open_chat: OpenChat):
    engine = ScriptedEngine(["first try", "second try", "a title", "long " * 20], tokenizer=tokenizer)
    async with open_chat(engine) as chat:
        await chat.say([user("q")])
        again = await chat.post([user("q")])
        assert again.headers["x-miles-kind"] == "root"
        titled = await chat.post([user("Generate a short title for this conversation: q")])
        assert titled.headers["x-miles-kind"] == "title"
        await chat.say([user("another")])
        body = {"reward": 1.0, "max_tokens": 60, "metadata": {"epoch": 3}}
        answer = (await chat.http.post(f"{chat.server}/sessions/s/samples", json=body, headers=chat.auth)).json()
        tree = (await chat.http.get(f"{chat.server}/sessions/s", headers=chat.auth)).json()
    assert [node["kind"] for node in tree["nodes"]] == ["retry", "root", "title", "fork"]
    [sample] = answer["samples"]
    assert (sample["id"], sample["metadata"]["epoch"], sample["metadata"]["kind"]) == ("s:1", 3, "main")
    assert sample["loss_denominator"] == sum(sample["loss_mask"])
    assert {entry["node"]: entry["why"].split(":")[0].split(" has")[0] for entry in answer["dropped"]} == {
        0: "retry",
        2: "title",
        3: "Its trajectory",
    }


async def test_an_unknown_path_says_what_is_served(tokenizer: Tokenizer, open_chat: OpenChat):
    async with open_chat(ScriptedEngine([])) as chat:
        response = await chat.http.post(f"{chat.url}/embeddings", headers=chat.auth)
    assert response.status_code == 404
    assert "is not served" in response.json()["error"]["message"]


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"\xff", b'"x"'])
async def test_a_body_that_is_no_object_is_a_400(body: bytes, tokenizer: Tokenizer, open_chat: OpenChat):
    async with open_chat(ScriptedEngine([])) as chat:
        url = f"{chat.url}/chat/completions"
        response = await chat.http.post(url, content=body, headers=chat.auth)
        assert response.status_code == 400
        opened = await chat.http.post(f"{chat.server}/sessions", content=body)
        assert opened.status_code == (400 if body else 201), "a session needs nothing said"


async def test_tools_with_tool_choice_none_are_left_out_of_the_prompt(tokenizer: Tokenizer, open_chat: OpenChat):
    engine = ScriptedEngine([CALL], tokenizer=tokenizer)
    async with open_chat(engine) as chat:
        reply = await chat.reply([user("q")], tools=TOOLS, tool_choice="none")
    assert reply["content"] == CALL
    assert (
        engine.requests[0].input_ids.tolist()
        == tokenizer.encode(tokenizer.render([user("q")], generation_prompt=True)).tolist()
    )
