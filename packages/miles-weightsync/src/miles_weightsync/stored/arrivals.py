"""The leader of a push waits until every engine says that it serves the version."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal

from ..engine import Deadline, EngineClient
from ..errors import EngineRequestError
from ..report import EngineOutcome

_INTERVAL_S = 0.1
_ANSWER_S = 2.0
"""An engine that hangs must not hide for long that others have arrived."""
_LAST_ANSWER_S = 1.0
"""What an engine has to answer in when the time is over; those that have arrived are to be seen."""


def wait_for_engines(
    urls: Sequence[str],
    version: int,
    *,
    store: str,
    timeout_s: float,
    api_key: str | None,
    kind: Literal["full", "delta"] | None,
    reason: str | None,
) -> tuple[EngineOutcome, ...]:
    """One outcome an engine, in order, after `timeout_s` and a last answer at the latest.

    Args:
        store: named in what is said of an engine that does not get there.
        kind: of the stored version, and `reason` why; told in the outcomes.
    """
    deadline = Deadline(timeout_s)
    start = time.monotonic()
    clients = {url: EngineClient(url, api_key=api_key) for url in urls}
    says: dict[str, str | EngineRequestError] = {}
    arrived: dict[str, float] = {}
    try:
        while True:
            for url in [url for url in urls if url not in arrived]:
                try:
                    patience = min(_ANSWER_S, max(deadline.left(), _LAST_ANSWER_S))
                    says[url] = clients[url].weight_version(Deadline(patience))
                except EngineRequestError as error:
                    says[url] = error
                if says[url] == str(version):
                    arrived[url] = time.monotonic() - start
            if len(arrived) == len(urls) or not deadline.left():
                break
            time.sleep(min(_INTERVAL_S, deadline.left()))
    finally:
        for client in clients.values():
            client.close()
    return tuple(
        EngineOutcome(
            url=url,
            ok=url in arrived,
            phase=None if url in arrived else "load",
            error=None if url in arrived else _missing(url, says[url], version, store=store, timeout_s=timeout_s),
            seconds={"load": arrived.get(url, timeout_s)},
            kind=kind,
            reason=reason,
            serves=_number(says[url]),
        )
        for url in urls
    )


def _missing(url: str, said: str | EngineRequestError, version: int, *, store: str, timeout_s: float) -> str:
    state = f"it does not answer ({said})" if isinstance(said, EngineRequestError) else f"it serves version {said}"
    return (
        f"{state} {timeout_s:g} s after version {version} was published. `miles-weightsync follow {store} "
        f"--engine {url}` should be running beside it; its log says why it does not bring the version."
    )


def _number(said: str | EngineRequestError) -> int | None:
    return int(said) if isinstance(said, str) and said.isdecimal() else None
