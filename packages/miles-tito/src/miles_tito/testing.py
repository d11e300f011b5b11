"""An engine in this process that follows a script: exact, instant, and interruptible where a test wants it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass

import numpy as np

from .engine.generation import GenerateRequest, Generation, join, one_version
from .errors import EngineError
from .records import FinishReason
from .tokens.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What the engine samples for one request of a test."""

    ids: Sequence[int]
    """Stop token included where the reply ends with one."""
    finish_reason: FinishReason = FinishReason.STOP
    error: EngineError | None = None
    """Raised behind `ids` instead of finishing."""


Script = Callable[[GenerateRequest], "Reply | str | Sequence[int] | Awaitable[Reply | str | Sequence[int]]"]
Logits = Callable[[np.ndarray], np.ndarray]


class ScriptedEngine:
    """Implements `miles_tito.engine.generation.Engine`.

    Attributes:
        version: weights that the tokens sampled from now on come from.
        requests: every request in order of arrival.
        aborted: ids of aborted requests.
    """

    def __init__(
        self,
        script: Script | Sequence[Reply | str | Sequence[int]],
        *,
        tokenizer: Tokenizer | None = None,
        version: int = 0,
        logits: Logits | None = None,
        before_token: Callable[[GenerateRequest, int], Awaitable[None]] | None = None,
    ) -> None:
        """
        Args:
            script: the reply to each request, or replies in order of arrival. Text ends with the tokenizer's end
                token; the request's budget cuts it, as an engine does.
            logits: [V] for the ids before a token; log-probs follow from it and the temperature. Without it every
                token has log-prob -1.
            before_token: awaited before each token of a request, so that a test decides when it comes.
        """
        self.version = version
        self.requests: list[GenerateRequest] = []
        self.aborted: list[str] = []
        self._script = script
        self._tokenizer = tokenizer
        self._logits = logits
        self._before_token = before_token
        self._open = asyncio.Event()
        self._open.set()
        self._aborts: dict[str, asyncio.Event] = {}

    async def generate(self, request: GenerateRequest) -> Generation:
        return join([piece async for piece in self.stream(request)])

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[Generation, None]:
        await self._open.wait()
        index = len(self.requests)
        self.requests.append(request)
        aborted = self._aborts[request.rid] = asyncio.Event()
        finished = False
        try:
            reply = await self._reply(request, index)
            ids: list[int] = list(reply.ids)[: request.max_new_tokens]
            finish = reply.finish_reason if len(ids) == len(reply.ids) else FinishReason.LENGTH
            for n, token in enumerate(ids):
                if self._before_token:
                    await self._before_token(request, n)
                if aborted.is_set():
                    yield _piece([], [], self.version, FinishReason.ABORT)
                    finished = True
                    return
                logprob = self._logprob(request, ids[:n], token)
                last = n == len(ids) - 1 and reply.error is None
                yield _piece([token], [logprob], self.version, finish if last else None)
            if reply.error:
                raise reply.error
            if not ids:
                yield _piece([], [], self.version, finish)
            finished = True
        finally:
            self._aborts.pop(request.rid, None)
            if not finished:
                self.aborted.append(request.rid)

    async def abort(self, rid: str) -> None:
        if rid in self._aborts:
            self._aborts[rid].set()

    def pause(self) -> None:
        """As a weight update under pause mode "abort": running requests end early, new ones wait for `resume`."""
        self._open.clear()
        for aborted in self._aborts.values():
            aborted.set()

    def resume(self) -> None:
        self._open.set()

    async def aclose(self) -> None:
        for aborted in self._aborts.values():
            aborted.set()

    async def _reply(self, request: GenerateRequest, index: int) -> Reply:
        if callable(self._script):
            answer = self._script(request)
            reply = await answer if isinstance(answer, Awaitable) else answer
        else:
            assert index < len(self._script), f"the script has {len(self._script)} replies, request {index} came"
            reply = self._script[index]
        if isinstance(reply, str):
            assert self._tokenizer, "a script of texts needs the tokenizer"
            ids: list[int] = self._tokenizer.encode(reply).tolist()
            return Reply(ids=[*ids, self._tokenizer.eos_ids[0]])
        return reply if isinstance(reply, Reply) else Reply(ids=reply)

    def _logprob(self, request: GenerateRequest, sampled: list[int], token: int) -> float:
        if self._logits is None:
            return -1.0
        scaled = self._logits(np.asarray([*request.input_ids, *sampled], np.int32)).astype(np.float64)
        scaled = scaled / (request.sampling.temperature or 1.0)
        return float(scaled[token] - scaled.max() - np.log(np.exp(scaled - scaled.max()).sum()))


def _piece(ids: list[int], logprobs: list[float], version: int, finish: FinishReason | None) -> Generation:
    return Generation(
        output_ids=np.asarray(ids, np.int32),
        logprobs=np.asarray(logprobs, np.float32),
        versions=one_version(len(ids), version),
        finish_reason=finish,
    )
