"""The engines' end: keeps engines at the newest version of a store, from beside them.

```
 store ─▶ latest, chain ─▶ copy in host memory ─▶ Pusher, one rank ─▶ engines that do not serve that version
            └ every step, until nothing is new
```
Whatever happens to this process, the next one begins anew from the store: what engines say that they serve is not
believed before they were pushed to, since a push may have been broken off.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch.distributed as dist

from ..config import PushConfig
from ..delta import DeltaStore
from ..engine import Deadline, EngineClient
from ..errors import EngineRequestError, PushConfigError, SyncError
from ..push import Pusher
from ..report import SyncReport
from ..urls import engine_urls
from .copy import Fetched, HostCopy, Stopped

_ANSWER_S = 5.0
READ_BYTES = 1 << 28

_log = logging.getLogger(__name__)


class Follower:
    """Brings engines to the newest version of a store, a step at a time. Not for several threads, but for `stop`."""

    def __init__(
        self,
        store: str | DeltaStore,
        engines: Sequence[str],
        config: PushConfig | None = None,
        *,
        api_key: str | None = None,
        read_bytes: int = READ_BYTES,
    ) -> None:
        """
        Args:
            store: where the trainer pushes with `way = store`: a path, or a URL of fsspec.
            engines: base URLs of SGLang servers, reached as `config` says.
            config: how to push to them; any way but `store`.
            api_key: sent to every engine.
            read_bytes: of parts that are read from the store at a time.
        """
        self._config = config if config is not None else PushConfig()
        if self._config.way == "store":
            raise PushConfigError("`way = store` puts weights into a store; a follower pushes in another way.")
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise PushConfigError("A follower pushes alone; run it in a process without torch.distributed.")
        if read_bytes < 1:
            raise PushConfigError(f"`read_bytes` is {read_bytes}; it must be at least 1.")
        self._urls = engine_urls(engines)
        self._stop = threading.Event()
        if not store:
            raise PushConfigError("`store` is empty; it is the path or the URL that the trainer pushes to.")
        store = store if isinstance(store, DeltaStore) else DeltaStore(store)
        self._store = store
        self._copy = HostCopy(store, read_bytes=read_bytes, stop=self._stop)
        self._api_key = api_key
        self._pusher: Pusher | None = None
        self._last = 0
        """Version pushed last by `_pusher`, which refuses earlier ones."""
        self._pushed: dict[str, str] = {}
        """By engine, the identity of the version that it got from this follower."""
        self._silent: dict[str, str] = {}
        self._fetched: Fetched | None = None

    @property
    def store(self) -> str:
        """Where the versions are."""
        return self._store.url

    @property
    def version(self) -> int | None:
        """The version held in host memory."""
        return self._copy.version

    @property
    def fetched(self) -> Fetched | None:
        """How the version held came here."""
        return self._fetched

    @property
    def silent(self) -> Mapping[str, str]:
        """Engines that did not answer at the last step, and why."""
        return self._silent

    @property
    def is_current(self) -> bool:
        """Whether every engine serves the version held, as of the last step."""
        held = self._copy.version is not None
        return held and not self._silent and all(self._pushed.get(u) == self._copy.identity for u in self._urls)

    def step(self) -> SyncReport | None:
        """Fetch what is new and push it to the engines that do not serve it. None where there is nothing to push.

        What cannot be fetched is raised after the engines were seen to: one that started again gets the version held.

        Raises:
            StoreError: the store cannot be read. Engines go on with what they serve; step again later.
            SyncError: an engine did not get there, see `Pusher.push`; step again.
        """
        problem: Exception | None = None
        try:
            fetched = self._copy.fetch()
            self._fetched = fetched or self._fetched
        except Stopped:
            return None
        except Exception as error:  # object stores have errors of their own; it is raised below
            problem = error
        report = self._serve() if self._copy.version is not None and not self._stop.is_set() else None
        if problem is not None:
            raise problem
        return report

    def stop(self) -> None:
        """From another thread or a signal handler: a fetch breaks off, a push is brought to its end."""
        self._stop.set()

    @property
    def is_stopped(self) -> bool:
        return self._stop.is_set()

    def close(self) -> None:
        """Let go of engines and memory."""
        self._copy.drop()
        if self._pusher is not None:
            self._pusher.close()
            self._pusher = None

    def __enter__(self) -> Follower:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve(self) -> SyncReport | None:
        """Push the version held to every engine that needs it."""
        version, identity = self._copy.version, self._copy.identity
        assert version is not None, "asked before"
        with ThreadPoolExecutor(len(self._urls), thread_name_prefix="weightsync follow") as pool:
            says = dict(zip(self._urls, pool.map(self._ask, self._urls), strict=True))
        self._note_silent({url: str(said) for url, said in says.items() if isinstance(said, EngineRequestError)})
        answering = [url for url in self._urls if url not in self._silent]
        urls = [url for url in answering if says[url] != str(version) or self._pushed.get(url) != identity]
        if not urls:
            return None
        for url in urls:
            if self._pushed.pop(url, None) == identity:
                _log.warning("%s serves version %s, not the %d pushed: it started again", url, says[url], version)
        try:
            report = self._push(urls, version)
        except SyncError as error:
            self._pushed.update({outcome.url: identity for outcome in error.engines if outcome.ok})
            raise
        self._pushed.update(dict.fromkeys(urls, identity))
        if self._fetched is not None:
            _log.info(
                "version %d: %s, %d bytes read in %.2f s; pushed to %d of %d engines in %.2f s",
                *(version, self._fetched.kind, self._fetched.bytes, self._fetched.seconds),
                *(len(urls), len(self._urls), report.total_seconds),
            )
        return report

    def _push(self, urls: Sequence[str], version: int) -> SyncReport:
        if self._pusher is not None and version < self._last:
            self._pusher.close()  # the store was emptied, and counts anew
            self._pusher = None
        self._last = version
        if self._pusher is None:
            self._pusher = Pusher(urls, config=self._config, api_key=self._api_key)
        self._pusher.set_engines(urls)
        return self._pusher.push(self._copy.shards(), version=version)

    def _ask(self, url: str) -> str | EngineRequestError:
        client = EngineClient(url, api_key=self._api_key)
        try:
            return client.weight_version(Deadline(min(_ANSWER_S, self._config.timeout_s)))
        except EngineRequestError as error:
            return error
        finally:
            client.close()

    def _note_silent(self, silent: dict[str, str]) -> None:
        for url in silent.keys() - self._silent.keys():
            _log.warning("%s does not answer (%s); it is pushed to when it does", url, silent[url])
        self._silent = silent
