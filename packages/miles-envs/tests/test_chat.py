from __future__ import annotations

import asyncio
import json

import aiohttp
import pytest
from miles_envs.chat import ChatClient, connection_pool
from miles_envs.errors import ContextExceeded, InfraError
from miles_tito.records import Policy, Sampling
from scripted_model import answer, calls, completion, refusal

MESSAGES = [{"role": "user", "content": "?"}]


async def ask(policy, *, retry_for_s=0.0, **arguments):
    async with ChatClient(policy, retry_for_s=retry_for_s) as chat:
        return await chat.complete(MESSAGES, **arguments)


async def test_a_request_says_who_asks_and_how_to_sample(scripted, policy):
    model = scripted("4")
    answer = await ask(policy, tools=[{"type": "function"}])
    (request,) = model.requests
    assert request["url"] == "http://session/v1/chat/completions"
    assert request["authorization"] == "Bearer secret"
    assert request["messages"] == MESSAGES
    assert request["tools"] == [{"type": "function"}]
    assert (request["model"], request["temperature"], request["max_tokens"]) == ("m", 1.0, 24)
    assert answer.text == "4"
    assert answer.message == {"role": "assistant", "content": "4"}
    assert not answer.is_truncated


async def test_tool_calls_and_reasoning_go_back_into_the_conversation(scripted, policy):
    scripted({**calls(("add", "{}")), "content": None, "reasoning_content": "hm", "refusal": None})
    answer = await ask(policy)
    assert answer.message["content"] == ""
    assert answer.message["reasoning_content"] == "hm"
    assert answer.tool_calls[0]["function"]["name"] == "add"
    assert "refusal" not in answer.message


async def test_a_turn_that_ran_out_of_tokens_says_so(scripted, policy):
    scripted(completion("4 and", finish_reason="length"))
    assert (await ask(policy)).is_truncated


async def test_a_call_is_repeated_and_marked_while_its_session_server_is_away(scripted, policy):
    gone = aiohttp.ClientConnectionError("refused")
    model = scripted(aiohttp.ServerDisconnectedError(), gone, gone, "4")
    assert (await ask(policy, retry_for_s=30)).text == "4"
    assert [request["retry"] for request in model.requests] == [None, "1", "2", "3"]
    assert all(request["messages"] == MESSAGES for request in model.requests)


async def test_a_server_that_is_silent_is_not_asked_twice(scripted, policy):
    model = scripted(aiohttp.SocketTimeoutError("slow"))
    with pytest.raises(InfraError, match="SocketTimeoutError"):
        await ask(policy, retry_for_s=30)
    assert len(model.requests) == 1


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (
            aiohttp.ClientConnectionError("refused"),
            "No answer from http://session/v1/chat/completions: ClientConnectionError refused",
        ),
        (aiohttp.SocketTimeoutError("slow"), "SocketTimeoutError"),
        (refusal(503, "engine is paused"), "answered 503: engine is paused"),
        (refusal(401, "No session"), "answered 401: No session"),
        (answer(502, text="<html>bad gateway"), "answered 502: <html>bad gateway"),
        (answer(500, json=["odd"]), "answered 500"),
        (answer(200, text="not json"), "answered no chat completion: not json"),
        (answer(200, json={"choices": []}), "answered no chat completion"),
        (completion("4", finish_reason="abort"), "finish_reason 'abort': the answer is not whole"),
    ],
)
async def test_whatever_the_policy_cannot_cause_is_infrastructure(scripted, policy, reply, message):
    scripted(reply)
    with pytest.raises(InfraError, match=message):
        await ask(policy)


async def test_the_status_of_a_refusal_is_kept(scripted, policy):
    scripted(refusal(503, "paused"))
    with pytest.raises(InfraError) as caught:
        await ask(policy)
    assert caught.value.status == 503


async def test_a_conversation_longer_than_the_context_is_the_policys_limit(scripted, policy):
    scripted(refusal(400, "maximum context length is 256 tokens", "context_length_exceeded"))
    with pytest.raises(ContextExceeded, match="256 tokens"):
        await ask(policy)


class SlowServer:
    """Answers each request of a connection once 300 others are waiting too."""

    def __init__(self) -> None:
        self._barrier = asyncio.Barrier(300)
        self.connections: list[asyncio.Task[None]] = []

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections.append(asyncio.create_task(self._serve(reader, writer)))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answer = {"choices": [{"message": {"role": "assistant", "content": "4"}, "finish_reason": "stop"}]}
        body = json.dumps(answer)
        while head := await _head(reader):
            length = next(
                int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")
            )
            await reader.readexactly(length)
            await self._barrier.wait()
            writer.write(f"HTTP/1.1 200 OK\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode())
        writer.close()
        await writer.wait_closed()


async def _head(reader: asyncio.StreamReader) -> bytes:
    """Of the next request; empty when the client has hung up."""
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return b""


async def test_hundreds_of_episodes_share_one_pool_without_waiting_for_one_another():
    slow = SlowServer()
    server = await asyncio.start_server(slow.accept, "127.0.0.1", 0, backlog=512)
    port = server.sockets[0].getsockname()[1]
    policy = Policy(base_url=f"http://127.0.0.1:{port}/v1", api_key="k", model="m", sampling=Sampling())
    async with connection_pool() as pool, asyncio.timeout(60):
        clients = [ChatClient(policy, pool=pool) for _ in range(300)]
        answers = await asyncio.gather(*(client.complete(MESSAGES) for client in clients))
        await asyncio.gather(*(client.aclose() for client in clients))
        assert not pool.closed
    assert [answer.text for answer in answers] == ["4"] * 300
    server.close()
    async with asyncio.timeout(60):
        await asyncio.gather(*slow.connections)
