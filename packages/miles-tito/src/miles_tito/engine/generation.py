"""One model call: what is asked of an engine, what comes back, and how an interrupted call goes on."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import numpy as np

from miles_tito.errors import EngineError, RequestSwallowed
from miles_tito.records import UNKNOWN_VERSION, FinishReason, Sampling, VersionSpan
from miles_tito.records.arrays import readonly
from miles_tito.shared.backoff import delay_s

from .expert_routing import RoutedDelta

logger = logging.getLogger(__name__)

RETRY_FOR_S = 300.0
"""How long a request is sent again and again after a broken connection, before the turn fails: longer than a router or
the only engine takes to start anew."""
MAX_WAIT_S = 2.0
"""Longest wait between two sendings."""
MAX_COUNTED_S = 30.0
"""Most that one sending counts towards `RETRY_FOR_S`: one that was held back while no engine served is no failure."""
MAX_EMPTY_ABORTS = 20
"""Aborts in a row without a new token, before the turn fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One model call as the engine gets it: token ids in. A session makes one for each turn."""

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
    images: tuple[str, ...] = ()
    """URLs of the images whose placeholders stand in `input_ids`, in their order."""
    structural_tag: str | None = None
    """The form that the reply must have, see `tokens.constrained_output`; an interrupted call then begins anew."""
    routed_from: int = 0
    """The first of `input_ids` whose experts are not known yet, for engines that report them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """Tokens that an engine sampled: all of a call, or the next piece of one."""

    output_ids: np.ndarray
    """[C] int32, the sampled stop token included."""
    logprobs: np.ndarray
    """[C] float32 at the sampling temperature, before top-k and top-p."""
    versions: tuple[VersionSpan, ...] = ()
    """Half-open spans over `output_ids`; they cover it."""
    finish_reason: FinishReason | None = None
    """None for a piece that is not the last."""
    cached_tokens: int = 0
    routed: tuple[RoutedDelta, ...] = ()
    """Experts of input tokens from `GenerateRequest.routed_from` on, the tokens sampled here but the last included."""

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


class EnginePool:
    """Several engines as one, where no router stands before them, for `miles-tito serve`.

    A session keeps to one engine, so its prefix stays cached.
    """

    def __init__(self, engines: Sequence[Engine]) -> None:
        if not engines:
            raise EngineError("An EnginePool needs at least one engine, got none.")
        self._engines = tuple(engines)

    async def generate(self, request: GenerateRequest) -> Generation:
        return await self._of(request.session_id).generate(request)

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[Generation, None]:
        async with aclosing(self._of(request.session_id).stream(request)) as pieces:
            async for piece in pieces:
                yield piece

    async def abort(self, rid: str) -> None:
        await asyncio.gather(*(engine.abort(rid) for engine in self._engines))

    async def aclose(self) -> None:
        await asyncio.gather(*(engine.aclose() for engine in self._engines))

    def _of(self, session_id: str) -> Engine:
        digest = hashlib.blake2b(session_id.encode(), digest_size=8).digest()
        return self._engines[int.from_bytes(digest, "big") % len(self._engines)]


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
        routed=tuple(delta for piece in pieces for delta in piece.routed),
    )


async def run_turn(engine: Engine, request: GenerateRequest, *, stream: bool) -> AsyncGenerator[Generation, None]:
    """The pieces of one turn, through everything that can interrupt it.

    An engine aborts its calls when weights change under pause mode "abort", and a connection can break. Either way
    the call goes on behind the tokens it has: same `rid`, and the budget that is left, not the whole one. A reply of a
    forced form comes whole, and an interrupted one from its beginning.

    Raises:
        EngineError: refused, interrupted too often, or unanswered for `RETRY_FOR_S`.
        RequestSwallowed: lost by the engine for a second time.
    """
    done: list[np.ndarray] = []
    left = request.max_new_tokens
    routed = request.routed_from
    retries = _Retries(request.rid)
    while True:
        ids = np.concatenate([request.input_ids, *done]) if done else request.input_ids
        current = replace(request, input_ids=ids, max_new_tokens=left, routed_from=routed)
        before = left
        error: EngineError | None = None
        try:
            async with aclosing(_pieces(engine, current, stream=stream and not request.structural_tag)) as pieces:
                async for piece in pieces:
                    if request.structural_tag and piece.finish_reason is FinishReason.ABORT:
                        continue  # a grammar cannot be taken up half-way
                    done.append(piece.output_ids)
                    left -= len(piece.output_ids)
                    routed = max([routed, *(delta.end for delta in piece.routed)])
                    if piece.finish_reason is not FinishReason.ABORT:
                        yield piece
                    elif len(piece.output_ids) or piece.routed:
                        yield replace(piece, finish_reason=None)
                    if piece.finish_reason not in (None, FinishReason.ABORT):
                        return
        except EngineError as caught:
            error = caught
        if left < before:
            retries.is_over()
        if error is not None:
            retries.failed(error)
            await engine.abort(request.rid)  # a lost call may still run, and two under one id are refused
        elif left == before:
            retries.aborted()
        if left <= 0:
            yield Generation(
                output_ids=np.empty(0, np.int32), logprobs=np.empty(0, np.float32), finish_reason=FinishReason.LENGTH
            )
            return
        if retries.wait_s:
            await asyncio.sleep(retries.wait_s)


class _Retries:
    """Failed sendings and empty aborts of one turn since its last token: how long to wait, and when to give up."""

    def __init__(self, rid: str) -> None:
        self._rid = rid
        self._spent_s = 0.0
        self._last: float | None = None
        """When the last sending failed."""
        self._in_a_row = self._empty_aborts = self._swallowed = 0

    @property
    def wait_s(self) -> float:
        """Before the next sending."""
        return delay_s(self._in_a_row, first_s=0.05, longest_s=MAX_WAIT_S) if self._in_a_row else 0.0

    def is_over(self) -> None:
        """A token came."""
        self._last, self._spent_s = None, 0.0
        self._in_a_row = self._empty_aborts = 0

    def failed(self, error: EngineError) -> None:
        """Count a sending without a whole answer; raises where that was the last one."""
        now = asyncio.get_running_loop().time()
        if self._last is None and error.retryable:
            logger.warning("%s is sent again, for up to %g s: %s", self._rid, RETRY_FOR_S, error)
        self._spent_s += 0.0 if self._last is None else min(now - self._last, MAX_COUNTED_S)
        self._last = now
        self._swallowed += isinstance(error, RequestSwallowed)
        if not error.retryable or self._spent_s > RETRY_FOR_S or self._swallowed > 1:
            raise error
        self._in_a_row += 1

    def aborted(self) -> None:
        """Count an abort without a token; raises where that was the last one."""
        self._in_a_row += 1
        self._empty_aborts += 1
        if self._empty_aborts > MAX_EMPTY_ABORTS:
            raise EngineError(
                f"Request {self._rid} was aborted {self._empty_aborts} times in a row without a token; the engine is "
                "overloaded or somebody aborts its requests without pausing it."
            )


async def _pieces(engine: Engine, request: GenerateRequest, *, stream: bool) -> AsyncGenerator[Generation, None]:
    if stream:
        async with aclosing(engine.stream(request)) as pieces:
            async for piece in pieces:
                yield piece
    else:
        yield await engine.generate(request)
