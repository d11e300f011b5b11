"""The routes of whoever runs agents: open, look at, collect from and close sessions."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from dataclasses import dataclass, replace
from typing import Annotated, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from miles_tito.errors import RequestError, SampleError
from miles_tito.records import Episode, Outcome, Sample, Sampling, Trajectory, check_reward
from miles_tito.records.encoding import encode_many, encode_samples, samples_to_safetensors
from miles_tito.records.episodes import to_samples
from miles_tito.sessions.session import Session
from miles_tito.sessions.turn_selection import picker_named

from .dialects import fields
from .dialects.chat import ChatTool
from .live_session import LiveSession
from .session_store import OWN, SessionService

JSON = "application/json"
MSGPACK = "application/msgpack"
SAFETENSORS = "application/x-safetensors"

Seconds = Annotated[float, msgspec.Meta(ge=0)]


class SessionRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of `POST /sessions`."""

    session_id: str | None = None
    family: str | None = None
    tools: list[ChatTool] = []
    """For requests that bring none of their own."""
    sampling: Sampling | None = None
    metadata: dict[str, Any] = {}
    deadline_s: Seconds | None = None
    """After this, running turns are aborted and new ones refused."""
    ttl_s: Seconds | None = None
    """Removed when unused for so long."""


class SamplesRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of `POST /sessions/{id}/samples`."""

    reward: float | None = None
    outcome: Outcome | None = None
    advantage: float | None = None
    """The reward where it is left out, 0 where there is no reward yet either."""
    prompt_id: str | None = None
    group_id: str | None = None
    picker: str = "default"
    max_tokens: fields.Positive | None = None
    """Longer trajectories are dropped."""
    metadata: dict[str, Any] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRoutes:
    """Endpoints below `/sessions`. They raise errors of Miles, which the application turns into answers."""

    service: SessionService

    async def health(self, request: Request) -> Response:
        store = self.service.store
        return json_response({"status": "ok", "sessions": len(store), "turns": store.num_turns, "pid": os.getpid()})

    async def metrics(self, request: Request) -> Response:
        store = self.service.store
        held = {
            "sessions_opened_total": store.num_opened,
            "sessions_expired_total": store.num_expired,
            "sessions": len(store),
            "turns": store.num_turns,
            "turns_running": len(store.running),
            "tokens": store.num_held_tokens,
        }
        return Response(self.service.metrics.text(held), media_type="text/plain; version=0.0.4")

    async def open(self, request: Request) -> Response:
        if self.service.api_key is not None and not self.service.is_operator(token(request)):
            raise RequestError(
                "Opening a session needs the server's API key as a bearer token.", status=401, code="invalid_api_key"
            )
        given = fields.read_object(await request.body() or b"{}")
        asked = fields.as_struct(given, SessionRequest)
        unknown = sorted({*given.get("sampling", ())} - {field.name for field in dataclasses.fields(Sampling)})
        if unknown:
            raise fields.refused("sampling", f"Fields that no sampling has: {', '.join(unknown)}.")
        if asked.session_id == OWN:
            raise fields.wrong("session_id", OWN, "another id; this one stands for the bearer token's own session")
        live, api_key = self.service.open(
            session_id=asked.session_id,
            family=asked.family,
            sampling=asked.sampling,
            tools=given.get("tools", ()),  # as they came, for the chat template
            metadata=asked.metadata,
            deadline_s=asked.deadline_s,
            ttl_s=asked.ttl_s,
        )
        session = live.session
        return json_response(
            {
                "session_id": session.id,
                "api_key": api_key,
                "base_url": f"{request.base_url}sessions/{session.id}/v1",
                "model": self.service.model,
                "sampling": session.sampling,
            },
            status=201,
        )

    async def describe(self, request: Request) -> Response:
        if request.method == "HEAD":
            return Response()  # clients look whether anybody is there, without a key
        return json_response(self._session(request).session.describe())

    async def close(self, request: Request) -> Response:
        await self.service.store.remove(self._session(request).session.id)
        return Response(status_code=204)

    async def trajectories(self, request: Request) -> Response:
        session = self._session(request).session
        picked = session.pick(picker_named(request.query_params.get("picker", "default")))

        def build() -> bytes:
            return encode_many(session.assemble(picked), Trajectory)

        return Response(await asyncio.to_thread(build), media_type=MSGPACK)

    async def samples(self, request: Request) -> Response:
        session = self._session(request).session
        asked = fields.as_struct(fields.read_object(await request.body() or b"{}"), SamplesRequest)
        picked = session.pick(picker_named(asked.picker), max_tokens=asked.max_tokens)
        accept = request.headers.get("accept", "")

        def build() -> Response:
            samples = _samples(session, session.assemble(picked), asked)
            if SAFETENSORS in accept:
                headers = {"x-miles-num-dropped": str(len(picked.dropped))}
                return Response(samples_to_safetensors(samples), media_type=SAFETENSORS, headers=headers)
            if MSGPACK in accept:
                return Response(encode_samples(samples, picked.dropped), media_type=MSGPACK)
            return json_response({"samples": samples, "dropped": picked.dropped})

        return await asyncio.to_thread(build)

    def _session(self, request: Request) -> LiveSession:
        return self.service.find(request.path_params["session_id"], token(request), operator=True)


def token(request: Request) -> str:
    """The bearer token, or Anthropic's header for it."""
    scheme, _, value = request.headers.get("authorization", "").partition(" ")
    return value.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "").strip()


def json_response(value: Any, *, status: int = 200) -> Response:
    """Plain data and records as JSON."""

    def plain(item: Any) -> Any:
        return item.tolist()

    return Response(msgspec.json.encode(value, enc_hook=plain), status_code=status, media_type=JSON)


def _samples(session: Session, trajectories: tuple[Trajectory, ...], asked: SamplesRequest) -> list[Sample]:
    if asked.outcome is not None:
        # Says no to a reward with an outcome that carries none, and the other way round.
        error = None if asked.outcome.has_reward else f"the client reported {asked.outcome}"
        check_reward(asked.outcome, asked.reward, error)
        if not asked.outcome.has_reward:
            raise SampleError(
                f"Outcome {asked.outcome} carries no reward, so session {session.id} is no training data."
            )
    episode = Episode(
        id=session.id,
        prompt_id=asked.prompt_id or session.id,
        group_id=asked.group_id or session.id,
        outcome=asked.outcome or Outcome.GRADED,
        reward=0.0 if asked.reward is None else asked.reward,
        trajectories=trajectories,
    )
    advantage = asked.advantage if asked.advantage is not None else asked.reward or 0.0
    return [
        replace(sample, reward=asked.reward, metadata={**sample.metadata, **asked.metadata})
        for sample in to_samples(episode, advantage)
    ]
