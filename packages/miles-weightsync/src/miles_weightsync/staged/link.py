"""The leader's connections to the receivers of one engine: made through the engine's own endpoints, then direct.

```
 no link ──attach──▶ every rank called back ──recover──▶ whole: all ranks serve the same version ──serve──▶
```
Whoever pauses an engine says so here (`is_held`); whatever fails then, `let_go` has it serve again if it is whole.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

from ..config import LOADER
from ..engine import Deadline, EngineClient
from ..errors import EngineRequestError, SyncError, WeightSyncError
from ..wire import Channel, ConnectionLost, Message
from .rendezvous import Rendezvous, address_towards
from .tables import EngineShape

_HELLO_S = 20.0
_LEAVE_S = 5.0
"""How long to try to leave an engine as it was found."""
_LAYOUT_KEYS = (
    "tp_size", "dp_size", "ep_size", "pp_size", "moe_dp_size", "attn_cp_size", "enable_dp_attention",
    "enable_dp_lm_head", "moe_dense_tp_size", "moe_a2a_backend", "speculative_algorithm", "device",
    "ep_num_redundant_experts", "enable_eplb",
)  # fmt: skip


class Link:
    """All receivers of one engine, held by one sender."""

    def __init__(self, client: EngineClient, token: str, tp: int, roles: Sequence[str], *, served_before: bool) -> None:
        """`served_before`: it was serving when we came, so no other way of pushing has left it half."""
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
        self.is_held = False
        """We have paused the engine, or found it paused, and have not had it serve again."""
        self._served_before = served_before

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
        served_before = not client.is_paused(deadline)
        tp = int(info.get("tp_size") or 1)
        link = cls(client, rendezvous.expect(), tp, roles, served_before=served_before)
        hellos = link._enter(rendezvous, deadline)
        try:
            link.states = [hello["state"] for hello in hellos]
            link._recover(deadline)
            if link.may_serve:
                link.serve(deadline)
            else:
                client.end(deadline)
        except BaseException:
            with suppress(WeightSyncError):
                link.let_go(Deadline(_LEAVE_S))
            link.close()
            raise
        if link.content is None and link.is_whole and served_before:
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
    def may_serve(self) -> bool:
        """It is whole, and no other way of pushing can have left it half: a stranger that we found paused waits for our
        first version."""
        return self.is_whole and (self._served_before or all(state["known"] for state in self.states))

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

    def serve(self, deadline: Deadline) -> None:
        """End the pause of an engine that is whole: close the session, stamp the version, continue.

        Raises:
            SyncError: it is not whole, and stays paused.
            EngineRequestError: it refused, or did not answer.
        """
        if not self.may_serve:
            raise SyncError(f"{self._client.url} stays paused: its ranks hold {self.states}", phase="resume")
        try:
            self._client.end(deadline)
        except EngineRequestError as error:
            if "no weight-update session" not in str(error):
                raise
        if self.version is not None:
            self._client.stamp(self.version, deadline)
        self._client.resume(deadline)
        self.is_held = False

    def let_go(self, deadline: Deadline) -> None:
        """If the engine is held, ask its ranks what they hold, and have it serve where that is one whole version.

        Raises:
            SyncError: a rank is gone.
            EngineRequestError: twice, it refused or did not answer. It is held still.
        """
        if not self.is_held:
            return
        self.refresh(deadline)
        if not self.may_serve:
            return
        try:
            self.serve(deadline)
        except EngineRequestError:  # a request may have been carried out and its answer lost
            self.serve(deadline)

    def close(self) -> None:
        for channel in self._channels:
            channel.close()

    def _enter(self, rendezvous: Rendezvous, deadline: Deadline) -> list[Message]:
        """Pause the engine and have every rank call back; on failure leave it as it was found."""
        is_ours = self._served_before  # a session that we hear nothing of: another sender's comes with a pause
        self.is_held = True
        try:
            self._client.pause("in_place", deadline)
            is_ours = self._client.open_session(deadline)
            return self._call_in(rendezvous, deadline)
        except BaseException:
            self._leave(is_ours=is_ours)
            raise
        finally:
            rendezvous.forget(self.token)

    def _call_in(self, rendezvous: Rendezvous, deadline: Deadline) -> list[Message]:
        try:
            host = address_towards(self._client.url)
        except OSError as error:
            raise SyncError(f"There is no way to {self._client.url}: {error}", phase="attach") from None
        for role in self._roles:
            order = {"op": "attach", "token": self.token, "role": role, "host": host, "port": rendezvous.port}
            order |= {"serving": self._served_before}
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

    def _recover(self, deadline: Deadline) -> None:
        """Bring an engine whose sender died in a commit to one whole version: forward if any rank has served the new
        one, which only happens when all had committed it; else back."""
        pending = {state["pending"]["content"] for state in self.states if state["pending"]}
        served = {state["content"] for state in self.states if not state["pending"]}
        if pending and len(pending) == 1 and served == pending:
            self.ask({"op": "finalize", "content": pending.pop()}, deadline)
        elif pending:
            self.command("undo", deadline)
        self.refresh(deadline)

    def _leave(self, *, is_ours: bool) -> None:
        """Nothing was done here, so an engine that was serving may go on."""
        patience = Deadline(_LEAVE_S)
        if is_ours:
            with suppress(EngineRequestError):
                self._client.end(patience)
        if is_ours and self._served_before:
            with suppress(EngineRequestError):  # it is not reachable; what made us leave is told
                self._client.resume(patience)


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
