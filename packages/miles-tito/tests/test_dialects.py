"""One conversation in three dialects, as the vendors' own clients read and send them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import anthropic
import httpx
import openai
import pytest
from miles_tito import EngineError, Tokenizer, create_app
from miles_tito.testing import Reply, ScriptedEngine

OpenChat = Callable[..., Any]
NAME = "make_file"
PARAMETERS = {"type": "object", "properties": {"path": {"type": "string"}}}
CALL = '<tool_call>\n{"name": "make_file", "arguments": {"path": "é.txt"}}\n</tool_call>'
THINKING = "<think>\nhm, é\n</think>\n\nOn it.\n"
USER: Any = {"role": "user", "content": "q"}
CHAT_TOOLS: Any = [{"type": "function", "function": {"name": NAME, "parameters": PARAMETERS}}]
MESSAGES_TOOLS: Any = [{"name": NAME, "input_schema": PARAMETERS, "cache_control": {"type": "ephemeral"}}]
RESPONSES_TOOLS: Any = [
    {"type": "namespace", "name": "files", "tools": [{"type": "function", "name": NAME, "parameters": PARAMETERS}]},
    {"type": "web_search"},
]


@pytest.fixture
def engine(tokenizer: Tokenizer) -> ScriptedEngine:
    return ScriptedEngine([THINKING + CALL, "Done: 漢", "Bye"], tokenizer=tokenizer)


async def tree(chat: Any) -> list[dict[str, Any]]:
    return (await chat.http.get(f"{chat.server}/sessions/s", headers=chat.auth)).json()["nodes"]


def kinds(nodes: list[dict[str, Any]]) -> list[str]:
    return [node["kind"] for node in nodes]


def claude(chat: Any) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(
        base_url=chat.url.removesuffix("/v1"),
        auth_token=chat.auth["Authorization"].removeprefix("Bearer "),
        http_client=anthropic.DefaultAsyncHttpxClient(trust_env=False),
        max_retries=0,
    )


def gpt(chat: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=chat.url,
        api_key=chat.auth["Authorization"].removeprefix("Bearer "),
        http_client=openai.DefaultAsyncHttpxClient(trust_env=False),
        max_retries=0,
    )


@pytest.mark.parametrize("stream", [False, True])
async def test_anthropics_own_client_holds_a_tool_conversation(
    stream: bool, tokenizer: Tokenizer, engine: ScriptedEngine, open_chat: OpenChat
):
    async with open_chat(engine) as chat, claude(chat) as client:

        async def ask(messages: list[Any]) -> anthropic.types.Message:
            fields: Any = {"model": "policy", "max_tokens": 90, "tools": MESSAGES_TOOLS, "messages": messages}
            fields |= {"system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]}
            if not stream:
                return await client.messages.create(**fields)
            async with client.messages.stream(**fields) as events:
                return await events.get_final_message()

        messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "q"}]}]
        first = await ask(messages)
        assert [block.type for block in first.content] == ["thinking", "text", "tool_use"]
        thinking, text, use = first.content
        assert isinstance(thinking, anthropic.types.ThinkingBlock)
        assert isinstance(text, anthropic.types.TextBlock)
        assert isinstance(use, anthropic.types.ToolUseBlock)
        assert (thinking.thinking, text.text, use.name, use.input) == ("hm, é", "On it.", NAME, {"path": "é.txt"})
        assert first.stop_reason == "tool_use"
        assert first.usage.output_tokens == len(tokenizer.encode(THINKING + CALL)) + 1
        assert first.usage.input_tokens == len(engine.requests[0].input_ids)
        result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "ok"}]}
        messages[0] = {"role": "user", "content": "q"}
        messages += [
            {"role": "assistant", "content": [block.model_dump() for block in first.content]},
            {"role": "user", "content": [result, {"type": "text", "text": "and?"}]},
        ]
        second = await ask(messages)
        assert (second.stop_reason, second.content[0].model_dump()["text"]) == ("end_turn", "Done: 漢")
        nodes = await tree(chat)
    assert kinds(nodes) == ["root", "turn"]
    prompt = tokenizer.decode(engine.requests[1].input_ids, keep=tokenizer.control_ids)
    assert prompt.endswith(
        "<tool_response>\nok\n</tool_response><|im_end|>\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("stream", [False, True])
async def test_openais_own_client_holds_a_tool_conversation_in_responses(
    stream: bool, tokenizer: Tokenizer, engine: ScriptedEngine, open_chat: OpenChat
):
    async with open_chat(engine) as chat, gpt(chat) as client:

        async def ask(asked: list[Any]) -> openai.types.responses.Response:
            fields: Any = {"model": "policy", "tools": RESPONSES_TOOLS, "input": asked, "instructions": "Be brief."}
            if not stream:
                return await client.responses.create(**fields, store=False)
            events = await client.responses.create(**fields, stream=True)
            return [event async for event in events][-1].response

        asked: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "q"}]}]
        first = await ask(asked)
        assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
        assert first.status == "completed"
        assert first.output_text == "On it."
        call = first.output[2].model_dump(exclude_none=True)
        assert (call["namespace"], call["name"], json.loads(call["arguments"])) == ("files", NAME, {"path": "é.txt"})
        assert first.usage
        assert first.usage.input_tokens == len(engine.requests[0].input_ids)
        asked += [item.model_dump(exclude_none=True) for item in first.output]
        asked += [{"type": "function_call_output", "call_id": call["call_id"], "output": "ok"}]
        assert (await ask(asked)).output_text == "Done: 漢"
        assert kinds(await tree(chat)) == ["root", "turn"]


@pytest.mark.parametrize("stream", [False, True])
async def test_openais_own_client_holds_a_tool_conversation_in_chat(
    stream: bool, engine: ScriptedEngine, open_chat: OpenChat
):
    async with open_chat(engine) as chat, gpt(chat) as client:

        async def ask(messages: list[Any]) -> Any:
            fields: Any = {"model": "policy", "messages": messages, "tools": CHAT_TOOLS}
            if not stream:
                return (await client.chat.completions.create(**fields)).choices[0].message
            message: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": []}
            async for chunk in await client.chat.completions.create(**fields, stream=True):
                delta = chunk.choices[0].delta
                message["content"] += delta.content or ""
                message["tool_calls"] += [call.model_dump(exclude={"index"}) for call in delta.tool_calls or []]
            return openai.types.chat.ChatCompletionMessage.model_validate(message)

        messages: list[Any] = [{"role": "user", "content": "q"}]
        first = await ask(messages)
        assert (first.content, first.tool_calls[0].function.name) == ("On it.", NAME)
        messages += [first.model_dump(exclude_none=True, exclude={"parsed", "tool_calls"})]
        messages[-1]["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": call.function.arguments},
            }
            for call in first.tool_calls
        ]
        messages += [{"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "ok"}]
        assert (await ask(messages)).content == "Done: 漢"
        assert kinds(await tree(chat)) == ["root", "turn"]


async def test_a_conversation_changes_its_dialect_and_stays_one_trajectory(
    tokenizer: Tokenizer, engine: ScriptedEngine, open_chat: OpenChat
):
    async with open_chat(engine) as chat:
        reply = await chat.reply([{"role": "user", "content": "q"}], tools=CHAT_TOOLS)
        use = {"type": "tool_use", "id": "x", "name": NAME, "input": {"path": "é.txt"}}
        body: dict[str, Any] = {
            "max_tokens": 50,
            "tools": [{"name": NAME, "input_schema": PARAMETERS}],
            "messages": [
                {"role": "user", "content": "q"},
                {"role": "assistant", "content": [{"type": "text", "text": reply["content"]}, use]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x", "content": "ok"}]},
            ],
        }
        assert (await chat.http.post(f"{chat.url}/messages", json=body, headers=chat.auth)).status_code == 200
        assert kinds(await tree(chat)) == ["root", "turn"]


async def sse(response: httpx.Response) -> list[tuple[str | None, dict[str, Any]]]:
    found: list[tuple[str | None, dict[str, Any]]] = []
    for block in response.text.split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.splitlines())
        if lines and lines["data"] != "[DONE]":
            found.append((lines.get("event"), json.loads(lines["data"])))
    return found


async def test_anthropics_events_come_in_their_order(engine: ScriptedEngine, open_chat: OpenChat):
    async with open_chat(engine) as chat:
        body = {
            "max_tokens": 90,
            "stream": True,
            "tools": MESSAGES_TOOLS,
            "messages": [{"role": "user", "content": ""}],
        }
        found = await sse(await chat.http.post(f"{chat.url}/messages", json=body, headers=chat.auth))
    assert all(name == data["type"] for name, data in found)
    names = [name for name, _ in found]
    runs = [name for n, name in enumerate(names) if n == 0 or names[n - 1] != name]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert runs == ["message_start", "ping", *block * 3, "message_delta", "message_stop"]
    indices = [data["index"] for name, data in found if name == "content_block_start"]
    assert indices == [0, 1, 2]
    assert found[-2][1]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


async def test_the_events_of_responses_come_in_their_order(engine: ScriptedEngine, open_chat: OpenChat):
    async with open_chat(engine) as chat:
        body = {"input": "q", "stream": True, "tools": RESPONSES_TOOLS}
        answer = await chat.http.post(f"{chat.url}/responses", json=body, headers=chat.auth)
        assert answer.headers["x-miles-left-out"] == "tools.web_search"
        found = await sse(answer)
    assert [data["sequence_number"] for _, data in found] == list(range(len(found)))
    assert all(name == data["type"] for name, data in found)
    names = [str(name).removeprefix("response.") for name, _ in found]
    runs = [name for n, name in enumerate(names) if n == 0 or names[n - 1] != name]

    def text(kind: str) -> list[str]:
        middle = ["content_part.added", f"{kind}.delta", f"{kind}.done", "content_part.done"]
        return ["output_item.added", *middle, "output_item.done"]

    call = [f"function_call_arguments.{what}" for what in ("delta", "done")]
    calls = ["output_item.added", *call, "output_item.done"]
    assert runs == ["created", "in_progress", *text("reasoning_text"), *text("output_text"), *calls, "completed"]
    assert found[-1][1]["response"]["output"] == [
        data["item"] for name, data in found if name == "response.output_item.done"
    ]


ENDINGS: dict[str, tuple[str, dict[str, Any], tuple[Any, Any]]] = {
    "messages, stop string": ("messages", {"max_tokens": 9, "stop_sequences": ["wo"]}, ("stop_sequence", "wo")),
    "messages, length": ("messages", {"max_tokens": 2}, ("max_tokens", None)),
    "messages, end": ("messages", {"max_tokens": 99}, ("end_turn", None)),
    "responses, length": ("responses", {"max_output_tokens": 2}, ("incomplete", {"reason": "max_output_tokens"})),
    "responses, end": ("responses", {}, ("completed", None)),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("case", ENDINGS)
async def test_why_a_reply_ended_is_told_in_the_dialects_words(
    case: str, stream: bool, tokenizer: Tokenizer, open_chat: OpenChat
):
    path, fields, (reason, detail) = ENDINGS[case]
    body = {"messages": [{"role": "user", "content": "q"}]} if path == "messages" else {"input": "q"}
    async with open_chat(ScriptedEngine(["one two three"], tokenizer=tokenizer)) as chat:
        answer = await chat.http.post(
            f"{chat.url}/{path}", json={**body, **fields, "stream": stream}, headers=chat.auth
        )
    if path == "messages":
        found = (await sse(answer))[-2][1]["delta"] if stream else answer.json()
        assert (found["stop_reason"], found["stop_sequence"]) == (reason, detail)
    else:
        found = (await sse(answer))[-1][1]["response"] if stream else answer.json()
        assert (found["status"], found["incomplete_details"]) == (reason, detail)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "no limit": ("messages", {"max_tokens": None}, "max_tokens"),
    "forced tool without tools": ("messages", {"tool_choice": {"type": "any"}}, "no tool to call"),
    "forced tool that is none": (
        "messages",
        {"tool_choice": {"type": "tool", "name": "g"}, "tools": MESSAGES_TOOLS},
        "no tool 'g'",
    ),
    "choice of no kind": ("messages", {"tool_choice": {"type": "all"}}, "tool_choice"),
    "one tool at a time": (
        "messages",
        {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        "tool_choice",
    ),
    "service's own tool": (
        "messages",
        {"tools": [{"type": "web_search_20250305", "name": "x"}]},
        "web_search_20250305",
    ),
    "output format": (
        "messages",
        {"output_config": {"format": {"type": "json_schema"}}},
        "output_config.format.schema",
    ),
    "output format and tools": (
        "messages",
        {"output_config": {"format": {"type": "json_object"}}, "tools": MESSAGES_TOOLS},
        "not both",
    ),
    "output format and forced tool": (
        "messages",
        {"output_config": {"format": {"type": "json_object"}}, "tool_choice": {"type": "any"}},
        "together",
    ),
    "clearing": ("messages", {"context_management": {"edits": [{"type": "clear_tool_uses"}]}}, "context_management"),
    "servers": ("messages", {"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
    "unknown": ("messages", {"container": "x"}, "container"),
    "role": ("messages", {"messages": [{"role": "tool", "content": "x"}]}, "role"),
    "document": ("messages", {"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "document"),
    "block with more": (
        "messages",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "weight": 2}]}]},
        "weight",
    ),
    "text that is none": ("messages", {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "text"),
    "tool without name": ("messages", {"tools": [{"input_schema": {}}]}, "name"),
    "earlier response": ("responses", {"previous_response_id": "r"}, "previous_response_id"),
    "forced function without tools": ("responses", {"tool_choice": "required"}, "tool_choice"),
    "allowed tools": ("responses", {"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
    "format of no kind": ("responses", {"text": {"format": {"type": "grammar"}}}, "text.format"),
    "one call at a time": (
        "responses",
        {"tools": RESPONSES_TOOLS, "parallel_tool_calls": False},
        "parallel_tool_calls",
    ),
    "grammar tool": ("responses", {"tools": [{"type": "custom", "name": "apply_patch"}]}, "custom"),
    "background": ("responses", {"background": True}, "background"),
    "log-probs": ("responses", {"top_logprobs": 2}, "top_logprobs"),
    "log-probs included": ("responses", {"include": ["message.output_text.logprobs"]}, "include"),
    "item": ("responses", {"input": [{"type": "computer_call"}]}, "computer_call"),
    "number as input": ("responses", {"input": 3}, "input"),
    "arguments": ("responses", {"input": [{"type": "function_call", "name": "f", "arguments": "{"}]}, "arguments"),
    "twins": (
        "responses",
        {"tools": [{"type": "function", "name": "f"}, {"type": "function", "name": "f"}]},
        "Two tools",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_what_cannot_be_served_is_refused_in_the_dialects_shape(
    case: str, tokenizer: Tokenizer, open_chat: OpenChat
):
    path, fields, named = REFUSED[case]
    plain: dict[str, Any] = {"messages": [{"role": "user", "content": "q"}], "max_tokens": 9}
    body = {**(plain if path == "messages" else {"input": "q"}), **fields}
    engine = ScriptedEngine([], tokenizer=tokenizer)
    async with open_chat(engine) as chat:
        answer = await chat.http.post(f"{chat.url}/{path}", json=body, headers=chat.auth)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert named in answer.json()["error"]["message"]
    assert (answer.json().get("type") == "error") == (path == "messages")
    assert engine.requests == []


async def test_what_a_session_pins_is_named(tokenizer: Tokenizer, open_chat: OpenChat):
    async with open_chat(ScriptedEngine(["x", "y"], tokenizer=tokenizer)) as chat:
        body: dict[str, Any] = {
            "model": "claude",
            "max_tokens": 32000,
            "temperature": 0.1,
            "thinking": {"type": "enabled", "budget_tokens": 5},
            "output_config": {"effort": "high"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "messages": [{"role": "user", "content": "q"}],
        }
        answer = await chat.http.post(f"{chat.url}/messages", json=body, headers=chat.auth)
        assert answer.headers["x-miles-pinned"] == "temperature,max_tokens,model,thinking,output_config.effort"
        body = {"input": "q", "reasoning": {"effort": "low", "summary": "auto"}, "text": {"verbosity": "low"}}
        answer = await chat.http.post(f"{chat.url}/responses", json=body, headers=chat.auth)
        assert answer.headers["x-miles-pinned"] == "reasoning.effort,text.verbosity"


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
async def test_a_tool_that_asks_for_its_schema_to_be_kept_is_told_that_it_is_not(
    path: str, tokenizer: Tokenizer, open_chat: OpenChat
):
    tools: Any = {
        "chat/completions": [{"type": "function", "function": {"name": "f", "strict": True}}],
        "responses": [{"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f", "strict": True}]}],
        "messages": [{"name": "f", "input_schema": {}, "strict": True}],
    }[path]
    asked: dict[str, Any] = {"input": "q"} if path == "responses" else {"messages": [USER], "max_tokens": 9}
    async with open_chat(ScriptedEngine(["x"], tokenizer=tokenizer)) as chat:
        answer = await chat.http.post(f"{chat.url}/{path}", json={**asked, "tools": tools}, headers=chat.auth)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-miles-pinned"] == "tools.strict"


FAILURES = {
    "chat/completions": lambda body: body["error"]["code"] == "engine_error",
    "responses": lambda body: body["error"]["code"] == "engine_error",
    "messages": lambda body: body["type"] == "error" and body["error"]["type"] == "api_error",
}


@pytest.mark.parametrize("path", FAILURES)
async def test_an_engine_that_fails_before_the_first_token_is_a_status_even_to_a_stream(
    path: str, tokenizer: Tokenizer, open_chat: OpenChat
):
    failed = Reply(ids=[], error=EngineError("the engine is gone", status=500))
    async with open_chat(ScriptedEngine([failed, "fine"], tokenizer=tokenizer)) as chat:
        body: dict[str, Any] = {"messages": [{"role": "user", "content": "q"}], "max_tokens": 9}
        body = {"input": "q"} if path == "responses" else body
        answer = await chat.http.post(f"{chat.url}/{path}", json={**body, "stream": True}, headers=chat.auth)
        assert answer.status_code == 502
        assert FAILURES[path](answer.json())
        again = await chat.http.post(f"{chat.url}/{path}", json={**body, "stream": True}, headers=chat.auth)
        assert again.status_code == 200
        assert kinds(await tree(chat)) == ["root"]


@pytest.mark.parametrize("path", FAILURES)
async def test_an_engine_that_fails_later_ends_the_stream_with_the_dialects_error(
    path: str, tokenizer: Tokenizer, open_chat: OpenChat
):
    seen = asyncio.Event()

    async def hold(asked: Any, n: int) -> None:
        if n == 4:
            await seen.wait()

    ids = tokenizer.encode("abcdefgh").tolist()
    failed = Reply(ids=ids, error=EngineError("the engine is gone", status=500))
    engine = ScriptedEngine([failed], tokenizer=tokenizer, before_token=hold)
    async with open_chat(engine) as chat:
        body: dict[str, Any] = {"messages": [{"role": "user", "content": "q"}], "max_tokens": 9, "stream": True}
        body = {"input": "q", "stream": True} if path == "responses" else body
        text = ""
        async with chat.http.stream("POST", f"{chat.url}/{path}", json=body, headers=chat.auth) as response:
            assert response.status_code == 200
            async for part in response.aiter_text():
                text += part
                seen.set()
        last = text.rstrip().rsplit("\n\n", 1)[-1]
        data = json.loads(last.split("data: ", 1)[1])
        if path == "responses":
            assert (data["type"], data["response"]["error"]["code"]) == ("response.failed", "engine_error")
        else:
            assert "the engine is gone" in data["error"]["message"]
        if path == "messages":
            assert last.startswith("event: error")
        assert await tree(chat) == []


async def test_a_full_context_is_told_in_words_that_clients_know(tokenizer: Tokenizer, open_chat: OpenChat):
    async with open_chat(ScriptedEngine([], tokenizer=tokenizer), max_context=30) as chat:
        body: dict[str, Any] = {"messages": [{"role": "user", "content": "long " * 30}], "max_tokens": 5}
        answer = await chat.http.post(f"{chat.url}/messages", json=body, headers=chat.auth)
        assert answer.json()["error"]["message"].startswith("prompt is too long: ")
        answer = await chat.http.post(f"{chat.url}/responses", json={"input": "long " * 30}, headers=chat.auth)
        assert answer.json()["error"]["code"] == "context_length_exceeded"


async def test_counted_tokens_are_those_of_the_prompt_that_follows(tokenizer: Tokenizer, open_chat: OpenChat):
    engine = ScriptedEngine(["x", "y"], tokenizer=tokenizer)
    async with open_chat(engine) as chat:
        messages: list[Any] = [{"role": "user", "content": "q"}]
        for n in range(2):
            body: dict[str, Any] = {"messages": messages, "tools": MESSAGES_TOOLS, "system": "s"}
            counted = await chat.http.post(f"{chat.url}/messages/count_tokens", json=body, headers=chat.auth)
            answer = await chat.http.post(f"{chat.url}/messages", json={**body, "max_tokens": 5}, headers=chat.auth)
            assert counted.json() == {"input_tokens": len(engine.requests[n].input_ids)}
            messages += [{"role": "assistant", "content": answer.json()["content"]}, {"role": "user", "content": "r"}]
        assert len(await tree(chat)) == 2, "counting records nothing"


async def test_clients_without_a_path_find_their_session_by_its_key(tokenizer: Tokenizer, open_chat: OpenChat):
    async with open_chat(ScriptedEngine(["x", "y"], tokenizer=tokenizer)) as chat:
        key = chat.auth["Authorization"].removeprefix("Bearer ")
        body = {"messages": [{"role": "user", "content": "q"}], "max_tokens": 9}
        for path, headers in (("chat/completions", chat.auth), ("messages", {"x-api-key": key})):
            answer = await chat.http.post(f"{chat.server}/v1/{path}", json=body, headers=headers)
            assert (answer.status_code, answer.headers["x-miles-session"]) == (200, "s")
        assert (await chat.http.get(f"{chat.server}/v1/models", headers=chat.auth)).json()["data"][0]["id"] == "policy"
        assert (await chat.http.get(f"{chat.server}/sessions/self", headers=chat.auth)).json()["session_id"] == "s"


async def test_a_key_that_nobody_knows_opens_its_own_session_where_anybody_may(tokenizer: Tokenizer, served: Any):
    engine = ScriptedEngine(["x", "y"], tokenizer=tokenizer)
    app = create_app(engine=engine, tokenizer=tokenizer, family="auto", model="m", max_context=500)
    async with served(app) as url, httpx.AsyncClient(trust_env=False) as http:
        auth = {"Authorization": "Bearer my-own-word"}
        body = {"messages": [{"role": "user", "content": "q"}]}
        answer = await http.post(f"{url}/v1/chat/completions", json=body, headers=auth)
        assert answer.status_code == 200
        samples = await http.post(f"{url}/sessions/self/samples", json={"reward": 1.0}, headers=auth)
        assert len(samples.json()["samples"]) == 1
        name = answer.headers["x-miles-session"]
        other = {"Authorization": "Bearer another-word"}
        assert (await http.get(f"{url}/sessions/{name}", headers=other)).status_code == 401
        assert (await http.post(f"{url}/v1/chat/completions", json=body)).status_code == 401
        assert (await http.delete(f"{url}/sessions/self", headers=auth)).status_code == 204


async def test_a_key_that_nobody_knows_opens_nothing_on_a_server_with_a_key(tokenizer: Tokenizer, served: Any):
    app = create_app(
        engine=ScriptedEngine([]), tokenizer=tokenizer, family="auto", model="m", max_context=500, api_key="operator"
    )
    async with served(app) as url, httpx.AsyncClient(trust_env=False) as http:
        for key in ("guess", "operator"):
            auth = {"Authorization": f"Bearer {key}"}
            assert (await http.post(f"{url}/v1/messages", json={}, headers=auth)).status_code == 401
        assert (await http.get(f"{url}/health")).json()["sessions"] == 0


async def test_clients_may_look_whether_anybody_is_there(engine: ScriptedEngine, open_chat: OpenChat):
    async with open_chat(engine) as chat:
        for path in ("/", "/v1", "/sessions/s", "/sessions/absent", "/sessions/s/v1"):
            assert (await chat.http.head(f"{chat.server}{path}")).status_code == 200


async def test_an_unserved_path_of_messages_is_refused_in_its_shape(engine: ScriptedEngine, open_chat: OpenChat):
    async with open_chat(engine) as chat:
        answer = await chat.http.post(f"{chat.server}/other/v1/messages", json={})
        assert (answer.status_code, answer.json()["type"]) == (404, "error")


async def test_a_session_brings_its_tools_family_and_time_to_live(tokenizer: Tokenizer, served: Any):
    engine = ScriptedEngine([CALL] * 2, tokenizer=tokenizer)
    app = create_app(engine=engine, tokenizer=tokenizer, family="auto", model="m", max_context=900)
    async with served(app) as url, httpx.AsyncClient(trust_env=False) as http:
        body = {"tools": CHAT_TOOLS, "family": "tiny", "ttl_s": 0.0}
        opened = (await http.post(f"{url}/sessions", json=body)).json()
        auth = {"Authorization": f"Bearer {opened['api_key']}"}
        body = {"messages": [{"role": "user", "content": "q"}]}
        answer = await http.post(f"{opened['base_url']}/chat/completions", json=body, headers=auth)
        assert answer.json()["choices"][0]["message"]["tool_calls"]
        assert (await http.get(f"{url}/sessions/self", headers=auth)).json()["family"] == "tiny"
        await app.state.sessions.sweep()
        assert len(app.state.sessions) == 0
        refused = await http.post(f"{url}/sessions", json={"family": "none"})
        assert (refused.status_code, "known: auto" in refused.json()["error"]["message"]) == (400, True)


async def test_metrics_count_what_was_served(tokenizer: Tokenizer, open_chat: OpenChat):
    async with open_chat(ScriptedEngine(["x"], tokenizer=tokenizer)) as chat:
        await chat.say([{"role": "user", "content": "q"}])
        await chat.post([{"role": "user", "content": "q"}], n=3)
        text = (await chat.http.get(f"{chat.server}/metrics")).text
    path = "/sessions/{session_id}/v1/chat/completions"
    assert f'miles_tito_requests_total{{route="{path}",status="400"}} 1\n' in text
    assert 'miles_tito_turns_total{finish_reason="stop",kind="root"} 1\n' in text
    assert "miles_tito_completion_tokens_total 2\n" in text
    assert "miles_tito_sessions 1\n" in text
    assert "# TYPE miles_tito_added_seconds summary\n" in text
