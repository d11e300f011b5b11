"""Samples in the layouts that other trainers load: slime, verl, TRL. Plain lists and numpy arrays, no import of them.

All three part a trajectory into a prompt and a response. The prompt is everything in front of the first trained token;
the response holds the rest, later prompts and tool results included, masked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from miles_tito.errors import SampleError
from miles_tito.records import FinishReason, Sample


def to_slime(
    samples: Sequence[Sample], *, prompts: Sequence[str] = (), responses: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Each sample as a dictionary for slime's `Sample.from_dict`.

    Args:
        prompts: texts to show in logs; slime trains on the ids alone.
        responses: the same of what was sampled.
    """
    groups = {group: n for n, group in enumerate(dict.fromkeys(sample.group_id for sample in samples))}
    return [
        {
            "group_index": groups[sample.group_id],
            "index": n,
            "session_id": sample.episode_id,
            "prompt": prompts[n] if prompts else "",
            "response": responses[n] if responses else "",
            "tokens": sample.tokens.tolist(),
            "response_length": len(sample.tokens) - start,
            "loss_mask": sample.loss_mask[start:].astype(int).tolist(),
            "rollout_log_probs": sample.logprobs[start:].tolist(),
            "weight_versions": [str(span.version) for span in sample.versions],
            "rollout_routed_experts": _routed_rows(sample),
            "reward": sample.reward,
            "status": _SLIME_STATUS[_finish(sample)],
            "metadata": dict(sample.metadata),
        }
        for n, sample, start in _parted(samples)
    ]


def to_verl(
    samples: Sequence[Sample], *, prompt_length: int, response_length: int, pad_token_id: int
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Tensors and other columns for verl's `DataProto.from_dict`, as its agent loops make them.

    Prompts are padded on the left, responses on the right. Nothing is cut: a sample that does not fit is an error.

    Args:
        prompt_length: P, columns for the prompt.
        response_length: R, columns for the response.

    Returns:
        `[B, …]` arrays to turn into tensors, and the non-tensor columns. `uid` is the group, by which verl forms
        baselines; the reward stands on the last token of the response.

    Raises:
        SampleError: a prompt or response is longer than its columns.
    """
    size, width = len(samples), prompt_length + response_length
    ids = np.full((size, width), pad_token_id, np.int64)
    attention = np.zeros((size, width), np.int64)
    mask = np.zeros((size, response_length), np.int64)
    logprobs = np.zeros((size, response_length), np.float32)
    scores = np.zeros((size, response_length), np.float32)
    for n, sample, start in _parted(samples):
        length = len(sample.tokens) - start
        if start > prompt_length or length > response_length:
            raise SampleError(
                f"Sample {sample.id} has a prompt of {start} and a response of {length} tokens; the batch has "
                f"{prompt_length} and {response_length} columns."
            )
        row = slice(prompt_length - start, prompt_length + length)
        ids[n, row], attention[n, row] = sample.tokens, 1
        mask[n, :length] = sample.loss_mask[start:]
        logprobs[n, :length] = np.where(sample.loss_mask, sample.logprobs, 0)[start:]
        scores[n, length - 1] = np.nan if sample.reward is None else sample.reward
    tensors = {
        "prompts": ids[:, :prompt_length],
        "responses": ids[:, prompt_length:],
        "input_ids": ids,
        "attention_mask": attention,
        "position_ids": np.maximum(attention.cumsum(axis=1) - 1, 0),
        "response_mask": mask,
        "rollout_log_probs": logprobs,
    }
    if not np.isnan(scores).any():
        tensors["rm_scores"] = scores
    columns = {
        "uid": np.array([sample.group_id for sample in samples], object),
        "__num_turns__": np.array([int(sample.metadata.get("num_turns", 1)) for sample in samples], np.int32),
        "loss_denominator": np.array([sample.loss_denominator for sample in samples], np.int64),
        "min_global_steps": np.array([min((s.version for s in x.versions), default=None) for x in samples], object),
        "max_global_steps": np.array([max((s.version for s in x.versions), default=None) for x in samples], object),
    }
    return tensors, columns


def to_trl(samples: Sequence[Sample]) -> dict[str, list[Any]]:
    """What a `rollout_func` of TRL's `GRPOTrainer` returns: one entry a sample, in the order of its prompts.

    `env_mask` marks sampled tokens; every key but TRL's own reaches the reward functions, as `reward` does here.
    """
    parted = list(_parted(samples))
    return {
        "prompt_ids": [sample.tokens[:start].tolist() for _, sample, start in parted],
        "completion_ids": [sample.tokens[start:].tolist() for _, sample, start in parted],
        "logprobs": [np.where(sample.loss_mask, sample.logprobs, 0)[start:].tolist() for _, sample, start in parted],
        "env_mask": [sample.loss_mask[start:].astype(int).tolist() for _, sample, start in parted],
        "reward": [sample.reward for sample in samples],
    }


_SLIME_STATUS = {
    FinishReason.STOP: "completed",
    FinishReason.TOOL_CALLS: "completed",
    FinishReason.LENGTH: "truncated",
    FinishReason.ABORT: "aborted",
}


def _finish(sample: Sample) -> FinishReason:
    return FinishReason(sample.metadata.get("finish_reason", FinishReason.STOP))


def _parted(samples: Sequence[Sample]) -> list[tuple[int, Sample, int]]:
    """Number, sample, and the index of its first trained token."""
    for sample in samples:
        if not sample.loss_mask.any():
            raise SampleError(f"Sample {sample.id} trains none of its {len(sample.tokens)} tokens; leave it out.")
    return [(n, sample, int(sample.loss_mask.argmax())) for n, sample in enumerate(samples)]


def _routed_rows(sample: Sample) -> np.ndarray | None:
    """`[T - 1, L, K]` int32 as slime replays it, which knows no missing rows."""
    if sample.routed_experts is None or sample.routed_mask is None:
        return None
    missing = int((~sample.routed_mask[:-1]).sum())
    if missing:
        raise SampleError(
            f"Sample {sample.id} lacks the experts of {missing} of {len(sample.tokens) - 1} tokens, which slime cannot "
            "express; leave the sample out, or its routed experts."
        )
    return sample.routed_experts[:-1].astype(np.int32)
