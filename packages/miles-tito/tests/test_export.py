"""Episodes to samples: which tokens are trained, and what they count."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from miles_tito import Episode, Outcome, Trajectory, VersionSpan
from miles_tito.records.episodes import mask_older_versions, to_samples

TURNS = st.lists(
    st.tuples(st.integers(0, 3), st.lists(st.tuples(st.integers(1, 4), st.integers(-1, 3)), min_size=1, max_size=3)),
    min_size=1,
    max_size=4,
)
"""Turns: context tokens, then runs of sampled tokens with the version that sampled each run."""


def sampled(turns: list[tuple[int, list[tuple[int, int]]]]) -> Trajectory:
    mask: list[bool] = []
    spans: list[VersionSpan] = []
    for context, runs in turns:
        mask += [False] * context
        for length, version in runs:
            spans.append(VersionSpan(start=len(mask), end=len(mask) + length, version=version))
            mask += [True] * length
    return Trajectory(
        id="t",
        tokens=np.arange(len(mask), dtype=np.int32),
        loss_mask=np.array(mask),
        logprobs=np.where(mask, -0.5, 0.0).astype(np.float32),
        versions=tuple(spans),
    )


@given(TURNS)
def test_t01_only_the_tokens_of_the_newest_version_are_trained(turns: list[tuple[int, list[tuple[int, int]]]]) -> None:
    whole = sampled(turns)
    newest = max(span.version for span in whole.versions)
    by_token = np.full(len(whole.tokens), -2)
    for span in whole.versions:
        by_token[span.start : span.end] = span.version
    masked = mask_older_versions(whole)
    np.testing.assert_array_equal(masked.loss_mask, whole.loss_mask & (by_token == newest))
    assert masked.oldest_version == masked.newest_version == newest
    assert masked.num_loss_tokens > 0
    for name in ("tokens", "logprobs"):
        np.testing.assert_array_equal(getattr(masked, name), getattr(whole, name))
    assert mask_older_versions(masked) is masked


def test_masked_tokens_are_no_part_of_the_loss_denominator() -> None:
    trajectories = tuple(
        mask_older_versions(t)
        for t in (sampled([(1, [(3, 1), (4, 2)])]), sampled([(2, [(5, 2)])]), sampled([(1, [(2, 0), (1, 1)])]))
    )
    episode = Episode(
        id="g/0", prompt_id="p", group_id="g", outcome=Outcome.GRADED, reward=1.0, trajectories=trajectories
    )
    assert [int(s.loss_mask.sum()) for s in to_samples(episode, 1.0)] == [4, 5, 1]
    assert {s.loss_denominator for s in to_samples(episode, 1.0)} == {10}
    assert episode.oldest_version == 1


def test_a_trajectory_that_trains_nothing_has_no_age() -> None:
    untrained = Trajectory(
        id="t",
        tokens=np.arange(4, dtype=np.int32),
        loss_mask=np.zeros(4, dtype=np.bool_),
        logprobs=np.zeros(4, dtype=np.float32),
        versions=(VersionSpan(start=1, end=3, version=7),),
    )
    assert (untrained.oldest_version, untrained.newest_version) == (None, None)
    assert mask_older_versions(untrained) is untrained
