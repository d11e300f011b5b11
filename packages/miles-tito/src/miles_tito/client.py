"""What a rollout worker uses: opens sessions, reads what they recorded, closes them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, cast
from urllib.parse import quote

import msgspec

from .errors import SessionError
from .records import Policy, Sample, Sampling, Trajectory
from .records.encoding import decode_many, decode_samples
from .shared.http import Http, NoAnswer


class SessionClient:
    """Client of session servers: a rollout worker opens a session for each episode and collects its trajectories.

    A session lives on the one server that its id hashes to.
    """

    def __init__(
        self,
        base_urls: Sequence[str],
        *,
        api_key: str | None = None,
        timeout_s: float = 600.0,
        retry_for_s: float = 120.0,
    ) -> None:
        """
        Args:
            api_key: the servers' own; without it only sessions opened by this client can be read and closed.
            timeout_s: longest silence of a server.
            retry_for_s: how long a call is sent again after a broken connection: longer than a server takes to come
                back at its address.
        """
        if not base_urls:
            raise SessionError("A SessionClient needs the URL of at least one session server, got none.")
        self._urls = [url.rstrip("/") for url in base_urls]
        self._api_key = api_key
        self._retry_for_s = retry_for_s
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
        opened = cast("dict[str, Any]", msgspec.json.decode(await self._open(session_id, msgspec.json.encode(body))))
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

    async def samples(
        self,
        session_id: str,
        *,
        reward: float | None = None,
        picker: str = "default",
        max_tokens: int | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> tuple[list[Sample], list[dict[str, Any]]]:
        """What the session recorded so far as training samples, and each turn left out as `{"node", "why"}`.

        Args:
            reward: of all samples; None where it is not known yet, and then their advantage is 0.
            max_tokens: longer trajectories are left out.

        Raises:
            SessionError: refused, or no answer.
        """
        body = {"reward": reward, "picker": picker, "max_tokens": max_tokens, "metadata": dict(metadata or {})}
        url = f"{self._session_url(session_id)}/samples"
        content = msgspec.json.encode(body)
        return decode_samples(
            await self._call("POST", url, self._key(session_id), content=content, accept="application/msgpack")
        )

    async def close(self, session_id: str) -> None:
        """Abort what runs in the session and remove it. A session that is gone already is no error."""
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

    async def _open(self, session_id: str, body: bytes) -> bytes:
        url = f"{self._url(session_id)}/sessions"
        try:
            return await self._call("POST", url, self._api_key, content=body)
        except SessionError as error:
            if error.status != 409 or not error.was_resent or self._api_key is None:
                raise
        # The first sending opened it, and its answer with the key was lost with the server.
        await self._call("DELETE", self._session_url(session_id), self._api_key)
        return await self._call("POST", url, self._api_key, content=body)

    async def _call(
        self, method: str, url: str, key: str | None, *, content: bytes | None = None, accept: str = "*/*"
    ) -> bytes:
        """The answer to a call, which is sent again for a while when its connection breaks.

        Raises:
            SessionError: refused, or no answer.
        """
        headers = {"Accept": accept, **({"Authorization": f"Bearer {key}"} if key else {})}
        try:
            answer = await self._http.call(method, url, data=content, headers=headers, retry_for_s=self._retry_for_s)
        except NoAnswer as error:
            raise SessionError(str(error), was_resent=error.resent > 0) from error
        if answer.status >= 400:
            raise SessionError(
                f"{method} {url} answered {answer.status}: {answer.excerpt(500)}",
                status=answer.status,
                was_resent=answer.resent > 0,
            )
        return answer.body
