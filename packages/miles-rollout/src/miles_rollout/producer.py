"""Keeps the buffer supplied: credit, prompt, group, spool, put.

acquire ─▶ gate ─▶ next group, issued ─┬─▶ run_group ─▶ spool ─▶ put
   ▲                                   └─▶ …as many at once as there are credits
   └───────────────────────────────────────
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import cast

from miles_tito import GroupRef

from .buffer import GroupBuffer
from .dispatch import GroupRequest, RunGroup
from .errors import PromptsExhausted
from .fates import Fate
from .prompts import PromptSource
from .resume import Resume, ResumedGroup

Spool = Callable[[GroupRef], Awaitable[None]]
"""Makes a finished group durable; the buffer admits it only afterwards."""


class Gate:
    """Holds new groups back while an evaluation needs the engines of the producer; running ones finish."""

    def __init__(self) -> None:
        self._opened = asyncio.Event()
        self._opened.set()
        self._holders = 0

    @contextmanager
    def closed(self) -> Generator[None]:
        """No group is issued inside this block."""
        self._holders += 1
        self._opened.clear()
        try:
            yield
        finally:
            self._holders -= 1
            if not self._holders:
                self._opened.set()

    async def wait_open(self) -> None:
        while self._holders:
            await self._opened.wait()


async def produce(
    *,
    prompts: PromptSource,
    buffer: GroupBuffer,
    run_group: RunGroup,
    group_size: int,
    gate: Gate | None = None,
    spool: Spool | None = None,
    resume: Resume | None = None,
) -> None:
    """Issue groups as credits come free, until cancelled or the prompts end.

    A failed episode is data and never ends the production. An exception from `run_group`, `spool` or the buffer
    is a broken contract: it closes the buffer, so that a waiting `take` raises it, and is raised here. Groups that
    still run when this ends become aborted.

    Args:
        group_size: sibling episodes of each prompt.
        gate: closed while evaluation uses the engines.
        spool: awaited with each finished group before the buffer admits it.
        resume: where an earlier run stopped; `buffer` was restored from it. Its open groups come first.
    """
    gate = gate or Gate()
    requests = _Requests(prompts=prompts, buffer=buffer, group_size=group_size, resume=resume)
    run_one = partial(_run_one, buffer=buffer, run_group=run_group, spool=spool)
    try:
        async with asyncio.TaskGroup() as running:
            for group in resume.groups if resume else ():
                if group.ref is not None and not group.is_admitted:
                    running.create_task(run_one(requests.of(group), ref=group.ref), name=f"group {group.id}")
            while True:
                await buffer.acquire()
                try:
                    await gate.wait_open()
                    request = requests.next()
                except PromptsExhausted as ended:
                    buffer.refund()
                    buffer.finish(str(ended))
                    return  # the TaskGroup waits for what still runs
                except BaseException:
                    buffer.refund()
                    raise
                running.create_task(run_one(request), name=f"group {request.group_id}")
    except asyncio.CancelledError:
        buffer.finish("the producer was cancelled")
        raise
    except BaseExceptionGroup as errors:
        causes = _leaves(errors)
        buffer.close(causes[0])
        if len(causes) == 1:
            raise causes[0] from None  # what went wrong, without the wrapping
        raise


class _Requests:
    """Which group comes next: one that a stopped run left running, one that is to run again, one of the next prompt."""

    def __init__(self, *, prompts: PromptSource, buffer: GroupBuffer, group_size: int, resume: Resume | None) -> None:
        self._prompts = prompts
        self._buffer = buffer
        self._group_size = group_size
        self._left = deque(group for group in (resume.groups if resume else ()) if group.ref is None)
        self._number = resume.next_group if resume else 0

    def next(self) -> GroupRequest:
        """Bind the acquired credit to the next group, which runs now.

        Raises:
            PromptsExhausted: there is none.
        """
        if self._left:
            group = self._left.popleft()
            self._buffer.reissue(group.id)
            return self.of(group)
        retry = self._buffer.next_retry()
        prompt = self._prompts.next() if retry is None else retry.prompt
        group_id = f"g{self._number:06d}"
        self._number += 1
        retry_of = None if retry is None else retry.retry_of
        self._buffer.issue(group_id, prompt, retry_of=retry_of, drawn=self._prompts.drawn)
        return GroupRequest(prompt=prompt, group_id=group_id, group_size=self._group_size)

    def of(self, group: ResumedGroup) -> GroupRequest:
        """What runs a group that a stopped run left."""
        return GroupRequest(prompt=group.prompt, group_id=group.id, group_size=self._group_size, attempt=group.attempt)


async def _run_one(
    request: GroupRequest, *, buffer: GroupBuffer, run_group: RunGroup, spool: Spool | None, ref: GroupRef | None = None
) -> None:
    """One group from its issue to the buffer; however it ends, its fate is recorded.

    Args:
        ref: its result, where an earlier run had it on disk already.
    """
    try:
        if ref is None:
            ref = await run_group(request)
            if spool is not None:
                await spool(ref)
    except asyncio.CancelledError:
        fate = buffer.fate(request.group_id)
        if fate is not None and not fate.is_final:
            buffer.forfeit(request.group_id, Fate.ABORTED, "cancelled")
        raise
    except BaseException as error:
        buffer.close(error)  # at once: the credit of this group is not for another one
        raise
    buffer.put(ref)


def _leaves(errors: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    """The distinct errors inside nested groups, in order; one error often ends several tasks."""
    leaves: dict[int, BaseException] = {}
    for error in errors.exceptions:
        nested = isinstance(error, BaseExceptionGroup)
        for leaf in _leaves(cast("BaseExceptionGroup[BaseException]", error)) if nested else [error]:
            leaves.setdefault(id(leaf), leaf)
    return list(leaves.values())
