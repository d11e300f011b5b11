"""The leader's connections to the receivers of one engine: made through the engine's own endpoints, then direct.

```
 no link ──attach──▶ every rank called back ──recover──▶ whole: all ranks serve the same version
```
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, cast

from ..config import LOADER
from ..engine import Deadline, EngineClient
from ..errors import EngineRequestError, SyncError
from ..wire import Channel, ConnectionLost, Message
from .rendezvous import Rendezvous, address_towards
from .tables import EngineShape

_HELLO_S = 20.0
_LAYOUT_KEYS = (
    "tp_size", "dp_size", "ep_size", "pp_size", "moe_dp_size", "attn_cp_size", "enable_dp_attention",
    "enable_dp_lm_head", "moe_dense_tp_size", "moe_a2a_backend", "speculative_algorithm", "device",
    "ep_num_redundant_experts", "enable_eplb",
)  # fmt: skip


class Link:
    """All receivers of one engine, held by one sender."""

    def __init__(self, client: EngineClient, token: str, tp: int, roles: Sequence[str]) -> None:
        self._client = client
        self.token = token
        self.tp = tp
        self._roles = roles
        self._channels: list[Channel] = []
        self.hosts: tuple[str, ...] = ()
        self.known_plan: str | None = None
        self.claims: int | None = None
        """Version that a server says it has loaded itself, which nobody has checked; None where it serves a push."""
        self.states: list[Message] = []

    @classmethod
    def attach(cls, client: EngineClient, rendezvous: Rendezvous, deadline: Deadline) -> tuple[Link, EngineShape]:
        """Have every rank of an engine call this process.

        Raises:
            SyncError, EngineRequestError: it cannot be reached, has no receiver, or belongs to another sender.
        """
        info = client.server_info(deadline)
        loaders = cast("list[str]", info.get("custom_weight_loader") or [])
        if LOADER not in loaders:
            raise SyncError(
                f"{client.url} was started without a receiver; add `--custom-weight-loader {LOADER}`.", phase="attach"
            )
        if int(info.get("dp_size") or 1) > 1 and not info.get("enable_dp_attention"):
            raise SyncError(
                f"{client.url} runs {info['dp_size']} data-parallel replicas, for which SGLang refuses tensor updates; "
                "use one engine a replica.",
                phase="attach",
            )
        roles = ["target", *(["draft"] if info.get("speculative_algorithm") in ("EAGLE", "NEXTN") else [])]
        link = cls(client, rendezvous.expect(), int(info.get("tp_size") or 1), roles)
        was_paused = client.is_paused(deadline)
        client.pause("in_place", deadline)
        opened = client.open_session(deadline)
        try:
            hellos = link._call_in(rendezvous, deadline)
        except BaseException:
            if opened:
                link._leave(resume=not was_paused)
            raise
        finally:
            rendezvous.forget(link.token)
        try:
            known = any(hello["state"]["epoch"] for hello in hellos)
            link.states = [hello["state"] for hello in hellos]
            is_whole = link._recover(deadline)
            client.end(deadline)
            # A stranger that was paused when we came may be mixed by another way of pushing: it waits for our version.
            if is_whole and (known or not was_paused):
                client.resume(deadline)
        except BaseException:
            link.close()
            raise
        if link.content is None and link.is_whole and not was_paused:
            link.claims = _number(info.get("weight_version"))
        link.hosts = tuple(str(hello["host"]) for hello in hellos)
        return link, _shape(info, hellos)

    @property
    def is_alive(self) -> bool:
        return bool(self._channels) and not any(channel.is_closed for channel in self._channels)

    @property
    def content(self) -> str | None:
        """The weights that every rank serves; None when unknown or not the same."""
        served = {state["content"] for state in self.states}
        return served.pop() if len(served) == 1 and not any(s["broken"] or s["pending"] for s in self.states) else None

    @property
    def version(self) -> int | None:
        """The version that every rank serves."""
        return self.states[0]["version"] if self.content is not None else None

    @property
    def is_whole(self) -> bool:
        """Every rank holds the weights of the same version, whichever it is."""
        return not any(state["broken"] or state["pending"] for state in self.states) and (
            len({state["content"] for state in self.states}) == 1
        )

    @property
    def epoch(self) -> int:
        """The newest that any rank has seen."""
        return max(int(state["epoch"]) for state in self.states)

    def ask(self, messages: Message | Sequence[Message], deadline: Deadline) -> list[Message]:
        """Send every rank a message and wait for all answers, in rank order.

        Raises:
            SyncError: a rank is gone, did not answer in time, or answered with an error; names it.
        """
        per_rank = messages if isinstance(messages, Sequence) else [messages] * len(self._channels)
        nonce = secrets.token_hex(8)
        problems: list[str] = []
        answers: list[Message] = []
        for rank, (channel, message) in enumerate(zip(self._channels, per_rank, strict=True)):
            try:
                channel.send({**message, "id": nonce})
            except ConnectionLost as error:
                problems.append(f"rank {rank} is gone ({error})")
        for rank, channel in enumerate(self._channels):
            try:
                answers.append(_answer(channel, nonce, deadline))
            except ConnectionLost as error:
                problems.append(f"rank {rank} is gone ({error})")
            except TimeoutError:
                channel.close()  # a late answer must not be taken for that of a later question
                problems.append(f"rank {rank} did not answer within the push's {deadline.timeout_s:g} s")
        problems += [f"rank {rank}: {a['error']}" for rank, a in enumerate(answers) if a.get("error")]
        if problems:
            raise SyncError("; ".join(dict.fromkeys(problems)), phase="control")
        return answers

    def adopt(self, version: int, content: str, deadline: Deadline) -> None:
        """Tell every rank that what its server loaded has been found to be a version that was pushed."""
        self.ask({"op": "adopt", "version": version, "content": content}, deadline)
        self.refresh(deadline)

    def refresh(self, deadline: Deadline) -> None:
        """Ask every rank what it serves."""
        self.states = [answer["state"] for answer in self.ask({"op": "state"}, deadline)]

    def command(self, op: str, deadline: Deadline, **fields: object) -> list[Message | None]:
        """Run a command in every rank's engine thread, inside an open session.

        Returns:
            What it came to on each rank; None where it has not run.

        Raises:
            EngineRequestError: the engine refused or did not answer, and no rank tells more.
            SyncError: a rank is gone: what it holds is not known.
        """
        nonce = secrets.token_hex(8)
        refused: EngineRequestError | None = None
        order = json.dumps({"op": op, "token": self.token, "nonce": nonce, **fields})
        try:
            self._client.command(order, LOADER, ranks=self.tp, selector="target", deadline=deadline)
        except EngineRequestError as error:
            refused = error
        patience = deadline if deadline.left() > 1 else Deadline(1.0)
        answers = self.ask({"op": "outcome", "nonce": nonce}, patience)
        self.states = [answer["state"] for answer in answers]
        outcomes = [cast("Message | None", answer["outcome"]) for answer in answers]
        if refused is not None and all(outcome is None for outcome in outcomes):
            raise refused
        return outcomes

    def close(self) -> None:
        for channel in self._channels:
            channel.close()

    def _call_in(self, rendezvous: Rendezvous, deadline: Deadline) -> list[Message]:
        try:
            host = address_towards(self._client.url)
        except OSError as error:
            raise SyncError(f"There is no way to {self._client.url}: {error}", phase="attach") from None
        for role in self._roles:
            order = {"op": "attach", "token": self.token, "role": role, "host": host, "port": rendezvous.port}
            self._client.command(json.dumps(order), LOADER, ranks=self.tp, selector=role, deadline=deadline)
        found = rendezvous.collect(
            self.token,
            self.tp,
            timeout_s=min(_HELLO_S, deadline.left()),
            what=f"Receivers of {self._client.url} in ranks",
        )
        refused = [str(hello["refused"]) for _, hello in found.values() if hello.get("refused")]
        if refused:
            for channel, _ in found.values():
                channel.close()
            raise SyncError(f"{self._client.url} refuses: {refused[0]}.", phase="attach")
        self._channels = [found[rank][0] for rank in range(self.tp)]
        return [found[rank][1] for rank in range(self.tp)]

    def _recover(self, deadline: Deadline) -> bool:
        """Bring an engine whose sender died in a commit to one whole version: forward if any rank has served the new
        one, which only happens when all had committed it; else back."""
        pending = {state["pending"]["content"] for state in self.states if state["pending"]}
        served = {state["content"] for state in self.states if not state["pending"]}
        if pending and len(pending) == 1 and served == pending:
            self.ask({"op": "finalize", "content": pending.pop()}, deadline)
        elif pending:
            self.command("undo", deadline)
        self.refresh(deadline)
        if self.version is not None:  # the sender may have died between the commit and the stamp
            self._client.stamp(self.version, deadline)
        return self.is_whole

    def _leave(self, *, resume: bool) -> None:
        patience = Deadline(5.0)
        try:
            self._client.end(patience)
            if resume:
                self._client.resume(patience)
        except EngineRequestError:
            pass  # it is not reachable; what made us leave is told


def _number(text: object) -> int | None:
    try:
        return int(str(text))
    except ValueError:
        return None


def _answer(channel: Channel, nonce: str, deadline: Deadline) -> Message:
    while True:
        answer = channel.receive(max(deadline.left(), 0.01))
        if answer.get("id") == nonce:
            return answer


def _shape(info: Mapping[str, Any], hellos: Sequence[Message]) -> EngineShape:
    params_R = tuple(
        {name: (tuple(shape), dtype) for name, (shape, dtype) in hello["params"].items()} for hello in hellos
    )
    kept = {key: info.get(key) for key in _LAYOUT_KEYS}
    return EngineShape(kept, hellos[0]["config"], params_R)
