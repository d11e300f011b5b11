"""Demonstrations to trajectories, token for token as a session would have recorded them.

Prompts and tool results are joined by the same `Joiner` that serves sessions, and each assistant turn is encoded
alone behind its opening: a policy warmed up on these ids meets the very same ids when it samples.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from miles_tito.errors import SampleError
from miles_tito.records import UNKNOWN_VERSION, Message, Trajectory, VersionSpan

from .merge import Joiner, Setting
from .messages import normalize


def supervised_trajectory(
    joiner: Joiner, messages: Sequence[Message], *, id: str, setting: Setting | None = None
) -> Trajectory:
    """One conversation whose assistant turns, close tokens included, are to be imitated.

    Log-probs are 0 and versions unknown: nothing was sampled.

    Raises:
        SampleError: the conversation has no assistant turn, or begins with one.
        TemplateError: the template cannot be joined append-only.
    """
    setting = setting or Setting()
    messages = normalize(list(messages))
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns or turns[0] == 0:
        raise SampleError(
            f"Conversation {id} of {len(messages)} messages "
            + ("begins with an assistant turn" if turns else "has no assistant turn")
            + "; a demonstration is a prompt followed by assistant turns."
        )
    pieces = [joiner.start(messages[: turns[0]], setting)]
    mask = [np.zeros(len(pieces[0]), np.bool_)]
    for index, end in zip(turns, [*turns[1:], None], strict=True):
        reply = joiner.encode_reply(messages[index], setting)
        pieces.append(reply)
        mask.append(np.ones(len(reply), np.bool_))
        if end is not None:
            between = joiner.extend(messages[index + 1 : end], setting, last=int(reply[-1]), reply=messages[index])
            pieces.append(between)
            mask.append(np.zeros(len(between), np.bool_))
            # Where the next message's first token ends the turn, the policy samples it: it is to be learned.
            mask[-1][:1] = joiner.close_id is None
    tokens = np.concatenate(pieces)
    return Trajectory(
        id=id,
        tokens=tokens,
        loss_mask=np.concatenate(mask),
        logprobs=np.zeros(len(tokens), np.float32),
        versions=(VersionSpan(start=0, end=len(tokens), version=UNKNOWN_VERSION),),
    )
