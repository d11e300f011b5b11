"""One model call: what is asked of an engine, what comes back, and how an interrupted call goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import numpy as np

from .arrays import readonly
from .errors import EngineError
from .records import UNKNOWN_VERSION, FinishReason, Sampling, VersionSpan

MAX_RETRIES = 2
"""Re-sendings of one request after a broken connection, before the turn fails."""
MAX_EMPTY_ABORTS = 20
"""Aborts in a row without a new token, before the turn fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """Tokens in."""

    rid: str
    """Names this call at the engine; a retry keeps it, so that it can never run twice."""
    session_id: str
    """Routing key: the calls of a session share a prefix cache."""
    input_ids: np.ndarray
    """[P] int32."""
    sampling: Sampling
    max_new_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """Tokens out: all of a call, or the next piece of one."""

    output_ids: np.ndarray
    """[C] int32, the sampled stop token included."""
    logprobs: np.ndarray
    """[C] float32 at the sampling temperature, before top-k and top-p."""
    versions: tuple[VersionSpan, ...] = ()
    """Half-open spans over `output_ids`; they cover it."""
    finish_reason: FinishReason | None = None
    """None for a piece that is not the last."""
    cached_tokens: int = 0

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        set_(self, "output_ids", readonly(self.output_ids, np.int32, "output_ids", ndim=1))
        set_(self, "logprobs", readonly(self.logprobs, np.float32, "logprobs", ndim=1))
        if len(self.output_ids) != len(self.logprobs):
            raise EngineError(
                f"The engine returned {len(self.output_ids)} tokens but {len(self.logprobs)} log-probs; ask it for "
                "`return_logprob`."
            )
        bad = np.flatnonzero(~np.isfinite(self.logprobs))
        if len(bad):
            raise EngineError(
                f"The engine returned a log-prob that is not finite for {len(bad)} of {len(self.logprobs)} tokens, "
                f"the first at {bad[0]}: {self.logprobs[bad[0]]}."
            )
        end = 0
        for span in self.versions:
            if span.start != end:
                raise EngineError(f"The engine's weight versions leave tokens [{end}, {span.start}) without one.")
            end = span.end
        if end != len(self.output_ids):
            raise EngineError(f"The engine's weight versions end at token {end} of {len(self.output_ids)}.")


@runtime_checkable
class Engine(Protocol):
    """An inference engine that takes and returns token ids. Cancelling a call aborts it at the engine."""

    async def generate(self, request: GenerateRequest) -> Generation:
        """The whole call; `finish_reason` is set.

        Raises:
            EngineError: `retryable` says whether sending it again under the same `rid` may help.
        """
        ...

    def stream(self, request: GenerateRequest) -> AsyncGenerator[Generation, None]:
        """The call in disjoint pieces; only the last has a `finish_reason`. Raises like `generate`."""
        ...

    async def abort(self, rid: str) -> None:
        """End the call `rid` if it runs; a call that is not known is no error."""
        ...

    async def aclose(self) -> None: ...


def one_version(length: int, version: int = UNKNOWN_VERSION) -> tuple[VersionSpan, ...]:
    """All of `length` tokens under one version."""
    return (VersionSpan(start=0, end=length, version=version),) if length else ()


def join(pieces: Sequence[Generation]) -> Generation:
    """Consecutive pieces of one call as one."""
    spans: list[VersionSpan] = []
    offset = 0
    for piece in pieces:
        for span in piece.versions:
            start, end = span.start + offset, span.end + offset
            if spans and spans[-1].version == span.version:
                start = spans.pop().start
            spans.append(VersionSpan(start=start, end=end, version=span.version))
        offset += len(piece.output_ids)
    return Generation(
        output_ids=np.concatenate([p.output_ids for p in pieces]) if pieces else np.empty(0, np.int32),
        logprobs=np.concatenate([p.logprobs for p in pieces]) if pieces else np.empty(0, np.float32),
        versions=tuple(spans),
        finish_reason=pieces[-1].finish_reason if pieces else None,
        cached_tokens=pieces[0].cached_tokens if pieces else 0,
    )


async def run_turn(engine: Engine, request: GenerateRequest, *, stream: bool) -> AsyncGenerator[Generation, None]:
    """The pieces of one turn, through everything that can interrupt it.

    An engine aborts its calls when weights change under pause mode "abort", and a connection can break. Either way
    the call goes on behind the tokens it has: same `rid`, and the budget that is left, not the whole one.

    Raises:
        EngineError: refused, or interrupted too often.
    """
    done: list[np.ndarray] = []
    left = request.max_new_tokens
    retries = empty_aborts = 0
    while True:
        ids = np.concatenate([request.input_ids, *done]) if done else request.input_ids
        current = replace(request, input_ids=ids, max_new_tokens=left)
        before = left
        try:
            async with aclosing(_pieces(engine, current, stream=stream)) as pieces:
                async for piece in pieces:
                    done.append(piece.output_ids)
                    left -= len(piece.output_ids)
                    if piece.finish_reason is not FinishReason.ABORT:
                        yield piece
                    elif len(piece.output_ids):
                        yield replace(piece, finish_reason=None)
                    if piece.finish_reason not in (None, FinishReason.ABORT):
                        return
        except EngineError as error:
            retries = retries + 1 if left == before else 1
            if not error.retryable or retries > MAX_RETRIES:
                raise
            await engine.abort(request.rid)  # a lost call may still run, and two under one id are refused
        else:
            empty_aborts = empty_aborts + 1 if left == before else 0
            if empty_aborts > MAX_EMPTY_ABORTS:
                raise EngineError(
                    f"Request {request.rid} was aborted {empty_aborts} times in a row without a token; the engine is "
                    "overloaded or somebody aborts its requests without pausing it."
                )
        if left <= 0:
            yield Generation(
                output_ids=np.empty(0, np.int32), logprobs=np.empty(0, np.float32), finish_reason=FinishReason.LENGTH
            )
            return
        if left == before:
            await asyncio.sleep(min(0.05 * 2 ** max(retries, empty_aborts), 1.0))


async def _pieces(engine: Engine, request: GenerateRequest, *, stream: bool) -> AsyncGenerator[Generation, None]:
    if stream:
        async with aclosing(engine.stream(request)) as pieces:
            async for piece in pieces:
                yield piece
    else:
        yield await engine.generate(request)
