"""One episode's conversation with the policy: messages in, exact ids recorded, trajectories out.

    plan (match history) ─▶ encode (may run in a thread) ─▶ begin ─▶ … sampling … ─▶ commit | discard

A session changes only in `begin`, `commit` and `discard`; whatever is wrong with a request shows before.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import numpy as np

from miles_tito.engine.expert_routing import assemble, decode_deltas, encode_delta
from miles_tito.engine.generation import GenerateRequest, Generation
from miles_tito.errors import EngineError, RequestError, TemplateError
from miles_tito.records import FinishReason, Message, Sampling, Trajectory, TrajectoryKind, VersionSpan
from miles_tito.tokens.constrained_output import Form, is_kept, structural_tag
from miles_tito.tokens.families.parser import TurnParser
from miles_tito.tokens.merge import Joiner, Setting
from miles_tito.tokens.messages import call_prefix, value_key
from miles_tito.tokens.reply_parser import TurnReader, tool_schemas

from .tree import Match, Node, NodeKind, Tree
from .turn_kinds import Hints, classify
from .turn_selection import Picked, Picker, pick, pick_default

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._~:@+-]{0,199}")


_TRAJECTORY_KINDS = {
    NodeKind.ROOT: TrajectoryKind.MAIN,
    **{NodeKind(kind): kind for kind in TrajectoryKind if kind is not TrajectoryKind.MAIN},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A request matched against what the session recorded; nothing is changed yet."""

    messages: tuple[Message, ...]
    setting: Setting
    match: Match
    hints: Hints


@dataclass(slots=True, eq=False, kw_only=True)
class Turn:
    """A running model call: the request for the engine, and what reads its answer."""

    node: Node
    request: GenerateRequest
    reader: TurnReader
    setting: Setting
    form: Form | None = None
    pieces: list[Generation] = field(default_factory=list[Generation])


class Session:
    """One conversation, or several, of one episode: messages in, exact token ids recorded as a tree of turns.

    A session server holds one for each episode. No I/O; one thread at a time, `encode` excepted.
    """

    def __init__(
        self,
        session_id: str,
        joiner: Joiner,
        *,
        max_context: int,
        sampling: Sampling | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        metadata: Mapping[str, Any] | None = None,
        now: datetime | None = None,
    ) -> None:
        """
        Args:
            max_context: tokens of prompt and completion together that the engine takes.
            sampling: pinned for all turns.
            tools: for requests that bring none of their own.
            now: the date that templates print; by default the moment the session opens, for all its turns.
        """
        if not _ID.fullmatch(session_id):
            raise RequestError(
                f"Session id {session_id!r} must be 1 to 200 letters, digits or any of . _ ~ : @ + - and start with a "
                "letter or digit.",
                code="invalid_session_id",
                param="session_id",
            )
        self.id = session_id
        self.joiner = joiner
        self.sampling = sampling or Sampling()
        self.tools = tuple(tools)
        self.max_context = max_context
        self.metadata = dict(metadata or {})
        self.discarded = 0
        """Turns given up: the client left, the engine failed, the session closed, or the server died."""
        self.now = now or datetime.now().astimezone()
        self._tree = Tree()

    @property
    def num_turns(self) -> int:
        return sum(node.is_done for node in self._tree.nodes)

    @property
    def num_held_tokens(self) -> int:
        """Tokens that the recorded turns hold, each once."""
        return sum(len(node.prompt_ids) + len(node.completion_ids) for node in self._tree.nodes)

    def plan(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        hints: Hints | None = None,
    ) -> Plan:
        """Match normalized `messages` against what was recorded."""
        hints = hints or Hints()
        tools = self.tools if tools is None else tuple(tools)
        setting = Setting(tools=tools, variables=dict(variables or {}), now=self.now)
        # Another list of tools stands at the top of the prompt: nothing recorded can be continued.
        seed = value_key([list(setting.tools), dict(setting.variables), hints.agent])
        split = tuple(self._split_reasoning(m) if m["role"] == "assistant" else m for m in messages)
        return Plan(messages=split, setting=setting, match=self._tree.match(split, seed), hints=hints)

    def num_ids(self, plan: Plan, prompt_ids: np.ndarray) -> int:
        """Tokens of the whole prompt, whose new ones are `prompt_ids`."""
        return (plan.match.node.num_ids if plan.match.node else 0) + len(prompt_ids)

    def encode(self, plan: Plan) -> np.ndarray:
        """[N] int32, the ids that `plan` puts behind the turn it continues. Pure, so it may run in a thread.

        Raises:
            RequestError: the chat template refuses the messages.
        """
        node = plan.match.node
        try:
            if node is None:
                return self.joiner.start(plan.messages, plan.setting)
            last = int(node.completion_ids[-1]) if len(node.completion_ids) else None
            appended = plan.messages[plan.match.num_messages :]
            return self.joiner.extend(appended, plan.setting, last=last, reply=node.replay)
        except TemplateError as error:
            raise RequestError(str(error), code="invalid_messages", param="messages") from error

    def begin(
        self,
        plan: Plan,
        prompt_ids: np.ndarray,
        *,
        rid: str,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        form: Form | None = None,
    ) -> Turn:
        """Start the turn that `plan` describes.

        Raises:
            RequestError: the prompt leaves no room in the context, or `form` cannot be forced.
        """
        node = plan.match.node
        length = self.num_ids(plan, prompt_ids)
        if length >= self.max_context:
            raise RequestError(
                f"This model's maximum context length is {self.max_context} tokens, and the messages take {length}; "
                "no room is left for a reply. Shorten the conversation.",
                code="context_length_exceeded",
                param="messages",
            )
        budget = min(self.sampling.max_tokens, max_tokens or self.sampling.max_tokens, self.max_context - length)
        stops = (*self.sampling.stop, *stop)
        lineage = node.lineage if node else []
        images = self._images(plan, prompt_ids)
        in_reasoning = self.joiner.opens_reasoning(prompt_ids)
        schemas = tool_schemas(plan.setting.tools)
        tag = structural_tag(form, self.joiner.family, schemas, in_reasoning=in_reasoning) if form else None
        request = GenerateRequest(
            rid=rid,
            session_id=self.id,
            input_ids=np.concatenate([*_ids(lineage), prompt_ids]),
            sampling=self.sampling,
            max_new_tokens=budget,
            stop_token_ids=tuple(sorted({*self.joiner.stop_ids, *self.sampling.stop_token_ids, *stop_token_ids})),
            stop=stops,
            images=tuple(image["url"] for image in [*(i for n in lineage for i in n.images), *images]),
            structural_tag=tag,
            routed_from=max(node.num_ids - 1, 0) if node else 0,
        )
        reader = TurnReader(
            self.joiner.tokenizer,
            self.joiner.family,
            tools=plan.setting.tools,
            in_reasoning=in_reasoning,
            stop=stops,
        )
        # Last, so that whatever is wrong above leaves no turn behind.
        place = classify(plan.messages, plan.match, plan.hints, self._tree, has_tools=bool(plan.setting.tools))
        new = self._tree.add(plan.match, len(plan.messages), prompt_ids, rid=rid, place=place)
        new.images = images
        new.form = form.key if form else ""
        return Turn(node=new, request=request, reader=reader, setting=plan.setting, form=form)

    def commit(self, turn: Turn, generation: Generation) -> Node:
        """Record the whole answer to `turn`, whose reader has read it.

        Raises:
            EngineError: the engine did not keep to the form that it was asked for; nothing is recorded.
        """
        node = turn.node
        reply = turn.reader.message(call_prefix(turn.request.rid))
        finish = generation.finish_reason
        assert finish is not None, "only a finished generation is recorded"
        if turn.form and finish is FinishReason.STOP and not (turn.reader.stop_string or is_kept(turn.form, reply)):
            raise EngineError(
                f"The engine did not keep to the form that `{turn.form.param}` forces; it needs a grammar backend that "
                f"reads structural tags. It wrote: {reply['content']!r:.200}"
            )
        node.completion_ids = generation.output_ids
        node.logprobs = generation.logprobs
        node.versions = generation.versions
        node.routed = b"".join(map(encode_delta, generation.routed))
        calls = finish is FinishReason.STOP and reply.get("tool_calls")
        node.finish_reason = FinishReason.TOOL_CALLS if calls else finish
        node.message = reply
        node.stop_string = turn.reader.stop_string
        self._tree.commit(node, self._split_reasoning(reply))
        return node

    def discard(self, turn: Turn) -> None:
        """Give a running turn up; nothing of it is recorded but the count."""
        self._tree.discard(turn.node)
        self.discarded += 1

    def restore(self, nodes: Sequence[Node], *, next_id: int, next_branch: int, discarded: int) -> None:
        """Take over what an earlier session of this id recorded."""
        for node in nodes:
            node.replay = self._split_reasoning(node.message)
        self._tree.restore(nodes, next_id=next_id, next_branch=next_branch)
        self.discarded = discarded

    def undelivered(self, plan: Plan, form: Form | None = None) -> Node | None:
        """The recorded reply to the request of `plan` that no client got, as after a crash, if there is one."""
        lost = self._tree.undelivered(plan.match)
        return lost if lost and lost.form == (form.key if form else "") else None

    def trajectories(self, picker: Picker = pick_default) -> tuple[Trajectory, ...]:
        """One trajectory a turn that `picker` chooses; what several share is trained in the first of them."""
        return self.assemble(self.pick(picker))

    def pick(self, picker: Picker = pick_default, *, max_tokens: int | None = None) -> Picked:
        """The paths that `picker` chooses of what is recorded now."""
        return pick(self._tree.nodes, picker, max_tokens=max_tokens)

    def assemble(self, picked: Picked) -> tuple[Trajectory, ...]:
        """The trajectories of `picked`; touches nothing that changes, so it may run in a thread."""
        trained: set[int] = set()
        built: list[Trajectory] = []
        for path, label, name in zip(picked.paths, picked.labels, picked.ids, strict=True):
            built.append(self._trajectory(path, trained, label, name))
            trained.update(node.id for node in path)
        return tuple(built)

    def describe(self) -> dict[str, Any]:
        """The tree as plain data, without ids."""
        return {
            "session_id": self.id,
            "family": self.joiner.family.name,
            "num_turns": self.num_turns,
            "num_running": sum(not node.is_done for node in self._tree.nodes),
            "num_discarded": self.discarded,
            "metadata": self.metadata,
            "nodes": [
                {
                    "id": node.id,
                    "parent": node.parent.id if node.parent else None,
                    "origin": node.origin,
                    "trajectory": f"{self.id}:{node.branch}",
                    "kind": str(node.label),
                    "num_prompt_tokens": len(node.prompt_ids),
                    "num_completion_tokens": len(node.completion_ids),
                    "finish_reason": str(node.finish_reason) if node.finish_reason else None,
                    "is_forced": bool(node.form),
                    "versions": [[span.start, span.end, span.version] for span in node.versions],
                }
                for node in self._tree.nodes
            ],
        }

    def _trajectory(self, nodes: Sequence[Node], trained: set[int], label: NodeKind, name: str) -> Trajectory:
        tokens = np.concatenate(_ids(nodes))
        loss_mask, logprobs = np.zeros(len(tokens), np.bool_), np.zeros(len(tokens), np.float32)
        routed = assemble([delta for node in nodes for delta in decode_deltas(node.routed)], len(tokens))
        spans: list[VersionSpan] = []
        images: list[dict[str, Any]] = []
        end = 0
        for node in nodes:
            images += [{**image, "start": image["start"] + end} for image in node.images]
            start = end + len(node.prompt_ids)
            end = start + len(node.completion_ids)
            spans += [VersionSpan(start=s.start + start, end=s.end + start, version=s.version) for s in node.versions]
            if not node.form:
                logprobs[start:end] = node.logprobs
                loss_mask[start:end] = node.id not in trained
        return Trajectory(
            id=f"{self.id}:{name}",
            tokens=tokens,
            loss_mask=loss_mask,
            logprobs=logprobs,
            versions=tuple(spans),
            parent_id=self._parent_id(nodes),
            kind=_TRAJECTORY_KINDS[label],
            # A greedy engine reports log-probs at temperature 1.
            temperature=self.sampling.temperature or 1.0,
            routed_experts=routed.experts if routed else None,
            routed_mask=routed.mask if routed else None,
            routed_layers=routed.layers if routed else (),
            multimodal={"images": images} if images else None,
            finish_reason=nodes[-1].finish_reason or FinishReason.ABORT,
            metadata={**self.metadata, "num_turns": len(nodes)},
        )

    def _parent_id(self, nodes: Sequence[Node]) -> str | None:
        """The trajectory that this one branched off, or that called for it."""
        for node in reversed(nodes):
            if node.parent and node.parent.branch != node.branch:
                return f"{self.id}:{node.parent.branch}"
        origin = nodes[0].origin
        return None if origin is None else f"{self.id}:{self._tree.get(origin).branch}"

    def _images(self, plan: Plan, prompt_ids: np.ndarray) -> list[dict[str, Any]]:
        """The images that `prompt_ids` add, with their place in them and their number of tokens."""
        appended = plan.messages[plan.match.num_messages :]
        counts = self.joiner.image_counts(appended)
        if not counts:
            return []
        starts = self.joiner.image_starts(prompt_ids, counts)
        images = [image for message in appended for image in message.get("images", [])]
        return [
            {"url": image["url"], "digest": image["digest"], "start": start, "num_tokens": count}
            for image, start, count in zip(images, starts, counts, strict=True)
        ]

    def _split_reasoning(self, message: Message) -> Message:
        """Some clients replay reasoning inside the content, between its marks."""
        marks = self.joiner.family.reasoning
        if marks is None or "reasoning_content" in message or not message["content"].lstrip().startswith(marks[0]):
            return message
        parser = TurnParser(self.joiner.family, tools=False)
        parser.feed(message["content"])
        parser.finish()
        return {**message, **parser.message("")}


def _ids(nodes: Sequence[Node]) -> list[np.ndarray]:
    """The ids of a path, turn by turn."""
    return [ids for node in nodes for ids in (node.prompt_ids, node.completion_ids)]
