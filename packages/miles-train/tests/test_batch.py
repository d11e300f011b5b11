"""Token weights equal the closed form of each normalisation, however the batch is split."""

from __future__ import annotations

import numpy as np
import pytest
from miles_train import BatchError, BatchTotals, LossConfig, TrainConfig, batches_of, make_batch, sft_sample


def mask(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.bool_)


def weighted_sum(batches, value) -> float:
    return sum(
        float((m.weights[m.loss_mask] * value(m)[m.loss_mask]).sum()) for batch in batches for m in batch.micro_batches
    )


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("token_budget", [24, 64])
@pytest.mark.parametrize("normalization", ["episode", "token", "dr_grpo"])
def test_the_weighted_sum_is_the_closed_form_for_every_split(sample, normalization, token_budget, ranks):
    """Lengths 1 and 9, tool results masked out, one episode of two trajectories."""
    one = sample("one", 4, prompt=3)
    nine = sample("nine", 22, loss_mask=np.arange(22) % 2 == 1, prompt=4)
    main = sample("main", 12, prompt=8, episode_id="both", loss_denominator=10)
    helper = sample("helper", 9, prompt=3, episode_id="both", loss_denominator=10)
    samples = [one, nine, main, helper]
    config = TrainConfig(
        ranks=ranks,
        token_budget=token_budget,
        loss=LossConfig(normalization=normalization, max_tokens=32),
    )
    got = sum(
        weighted_sum(batches_of(samples, config, rank=rank), lambda m: m.tokens.astype(np.float64))
        for rank in range(ranks)
    )

    sums = {s.id: float(s.tokens[s.loss_mask].sum()) for s in samples}
    expected = {
        "episode": (sums["one"] / 1 + sums["nine"] / 11 + (sums["main"] + sums["helper"]) / 10) / 3,
        "token": sum(sums.values()) / 22,
        "dr_grpo": sum(sums.values()) / (3 * 32),
    }
    assert got == pytest.approx(expected[normalization], rel=1e-6)


def test_positions_masks_and_versions_stay_with_their_rows(sample):
    a, b = sample("a", 5, version=3), sample("b", 4, version=7, temperature=0.6)
    (m,) = make_batch([[a, b]], BatchTotals.of([a, b])).micro_batches
    assert m.cu_seqlens.tolist() == [0, 5, 9]
    assert m.positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3]
    assert m.versions.tolist() == [3] * 5 + [7] * 4
    assert m.temperatures.tolist() == pytest.approx([1.0] * 5 + [0.6] * 4)
    assert m.tokens.tolist() == [*a.tokens, *b.tokens]
    assert m.where(6) == "sample b, position 1"


def test_a_nan_outside_the_mask_disappears_and_one_inside_is_refused(sample):
    clean = sample("a", 6)
    noisy = sample("a", 6, logprobs=np.where(clean.loss_mask, clean.logprobs, np.nan))
    for s in (clean, noisy):
        (m,) = make_batch([[s]], BatchTotals.of([s])).micro_batches
        np.testing.assert_array_equal(m.logprobs, np.where(clean.loss_mask, clean.logprobs, 0))

    reference = np.zeros(6, dtype=np.float32)
    reference[4] = np.nan
    bad = sample("bad", 6, ref_logprobs=reference)
    with pytest.raises(BatchError, match="`ref_logprobs` of sample bad is nan at position 4"):
        make_batch([[bad]], BatchTotals.of([bad]))


def test_an_empty_micro_batch_carries_no_weight(sample):
    a = sample("a", 6)
    dummy, _ = make_batch([[], [a]], BatchTotals.of([a])).micro_batches
    assert dummy.num_tokens == 1
    assert not dummy.loss_mask.any()
    assert not dummy.weights.any()


def test_samples_that_cannot_be_trained_are_refused_by_name(sample):
    first = sample("first", 4, loss_mask=mask(1, 1, 1, 1))
    with pytest.raises(BatchError, match="Sample first trains its first token"):
        make_batch([[first]], BatchTotals.of([first]))
    greedy = sample("greedy", 6, temperature=0.0)
    with pytest.raises(BatchError, match=r"Sample greedy was sampled at temperature 0\.0"):
        make_batch([[greedy]], BatchTotals.of([greedy]))
    with pytest.raises(BatchError, match="0 episodes and 0 loss tokens"):
        BatchTotals(num_episodes=0, num_loss_tokens=0)


def test_a_demonstration_is_a_sample_of_advantage_one_and_unknown_version():
    demo = sft_sample("d", [1, 2, 3, 4], mask(0, 0, 1, 1))
    (m,) = make_batch([[demo]], BatchTotals.of([demo])).micro_batches
    assert m.advantages.tolist() == [0, 0, 1, 1]
    assert m.weights.tolist() == [0, 0, 0.5, 0.5]
    assert set(m.versions.tolist()) == {-1}
