"""What a rollout worker uses: opens sessions, reads what they recorded, closes them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, cast
from urllib.parse import quote

import msgspec

from .errors import SessionError
from .http import Http
from .records import Policy, Sampling, Trajectory
from .wire import decode_many


class SessionClient:
    """Talks to one or more session servers; a session lives on the one that its id hashes to."""

    def __init__(self, base_urls: Sequence[str], *, api_key: str | None = None, timeout_s: float = 600.0) -> None:
        """`api_key` is the servers' own; without it only sessions opened by this client can be read and closed."""
        if not base_urls:
            raise SessionError("A SessionClient needs the URL of at least one session server, got none.")
        self._urls = [url.rstrip("/") for url in base_urls]
        self._api_key = api_key
        self._keys: dict[str, str] = {}
        # The servers keep an idle connection for 300 s.
        self._http = Http(silence_s=timeout_s, max_connections=256, keepalive_s=240.0)

    async def open(
        self,
        session_id: str,
        *,
        sampling: Sampling,
        metadata: Mapping[str, Any] | None = None,
        deadline_s: float | None = None,
    ) -> Policy:
        """A new session, as an agent sees it.

        Args:
            sampling: pinned for all turns of the session.
            deadline_s: seconds from now after which running turns are aborted and new ones refused.

        Raises:
            SessionError: refused (409: the id is in use), or no answer.
        """
        body = {
            "session_id": session_id,
            "sampling": sampling,
            "metadata": dict(metadata or {}),
            "deadline_s": deadline_s,
        }
        url = self._url(session_id)
        answer = msgspec.json.decode(
            await self._call("POST", f"{url}/sessions", self._api_key, content=msgspec.json.encode(body))
        )
        opened = cast("dict[str, Any]", answer)
        self._keys[session_id] = opened["api_key"]
        return Policy(
            base_url=f"{url}/sessions/{quote(session_id, safe='')}/v1",
            api_key=opened["api_key"],
            model=opened["model"],
            sampling=sampling,
            session_id=session_id,
        )

    async def trajectories(self, session_id: str, *, picker: str = "default") -> tuple[Trajectory, ...]:
        """What the session recorded so far: one trajectory a branch, running turns left out.

        Args:
            picker: "default" leaves out retries and title calls, "leaves" does not, "all" gives one a turn.
        """
        url = f"{self._session_url(session_id)}/trajectories?picker={quote(picker)}"
        return decode_many(await self._call("GET", url, self._key(session_id)), Trajectory)

    async def close(self, session_id: str) -> None:
        """Abort what runs in the session and forget it. A session that is gone already is no error."""
        key = self._key(session_id)
        try:
            await self._call("DELETE", self._session_url(session_id), key)
        except SessionError as error:
            # Without a key of its own, a server answers 401 for a session that is gone as for one of somebody else.
            if error.status != 404 and (error.status != 401 or self._api_key is not None):
                raise
        finally:
            self._keys.pop(session_id, None)

    async def aclose(self) -> None:
        await self._http.aclose()

    def _url(self, session_id: str) -> str:
        digest = hashlib.blake2b(session_id.encode(), digest_size=8).digest()
        return self._urls[int.from_bytes(digest, "big") % len(self._urls)]

    def _session_url(self, session_id: str) -> str:
        return f"{self._url(session_id)}/sessions/{quote(session_id, safe='')}"

    def _key(self, session_id: str) -> str | None:
        return self._api_key or self._keys.get(session_id)

    async def _call(self, method: str, url: str, key: str | None, *, content: bytes | None = None) -> bytes:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        try:
            async with self._http.request(method, url, data=content, headers=headers) as response:
                answer: bytes = await response.read()
        except self._http.error as error:
            raise SessionError(f"{method} {url} got no answer: {type(error).__name__} {error}") from error
        if response.status >= 400:
            text = answer[:500].decode(errors="replace")
            raise SessionError(f"{method} {url} answered {response.status}: {text}", status=response.status)
        return answer
