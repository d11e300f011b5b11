"""Per-token losses: clipping, importance correction, KL with a gradient, and a loss of one's own."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from miles_train import ConfigError, CustomLoss, LossConfig, PolicyLoss, SftLoss
from miles_train.losses import LossInputs, TokenLoss, kl_estimate, needs, policy_loss, resolve_loss, sft_loss


def loss_inputs(logprobs, *, old=None, engine=None, advantages=None, ref=None, entropy=None) -> LossInputs:
    lp = torch.as_tensor(logprobs, dtype=torch.float32)
    old = lp.detach() if old is None else torch.as_tensor(old, dtype=torch.float32)
    return LossInputs(
        logprobs=lp,
        old_logprobs=old,
        engine_logprobs=old if engine is None else torch.as_tensor(engine, dtype=torch.float32),
        advantages=torch.ones_like(lp) if advantages is None else torch.as_tensor(advantages, dtype=torch.float32),
        weights=torch.full_like(lp, 1 / len(lp)),
        rows=torch.zeros(len(lp), dtype=torch.int64),
        ref_logprobs=None if ref is None else torch.as_tensor(ref, dtype=torch.float32),
        entropy=entropy,
    )


def at_ratio(ratios, advantages, **settings):
    log = torch.tensor(ratios).log().requires_grad_()
    out = policy_loss(loss_inputs(log, old=torch.zeros(len(ratios)), advantages=advantages), **settings)
    (grad,) = torch.autograd.grad(out.loss.sum(), log)
    return out, grad


def test_the_ratio_is_clipped_below_and_higher_above():
    out, grad = at_ratio([0.5, 0.9, 1.25, 1.5], [1.0, 1.0, 1.0, 1.0], clip_low=0.2, clip_high=0.28)
    assert out.loss.tolist() == pytest.approx([-0.5, -0.9, -1.25, -1.28])
    assert grad.tolist() == pytest.approx([-0.5, -0.9, -1.25, 0.0])
    assert out.metrics["ratio/clip_fraction"].tolist() == [0, 0, 0, 1]

    out, grad = at_ratio([0.5, 0.9, 1.5], [-1.0, -1.0, -1.0], clip_low=0.2, clip_high=0.28)
    assert out.loss.tolist() == pytest.approx([0.8, 0.9, 1.5])
    assert grad.tolist() == pytest.approx([0.0, 0.9, 1.5])


def test_dual_clip_bounds_the_loss_of_bad_tokens_only():
    out, grad = at_ratio([5.0, 2.0, 5.0], [-1.0, -1.0, 1.0], dual_clip=3.0)
    assert out.loss.tolist() == pytest.approx([3.0, 2.0, -1.28])
    assert grad.tolist() == pytest.approx([0.0, 2.0, 0.0])


def test_truncated_importance_sampling_weighs_by_trainer_over_engine_up_to_the_cap():
    lp = torch.zeros(3, requires_grad=True)
    ratio = torch.tensor([0.5, 1.5, 4.0])
    out = policy_loss(loss_inputs(lp, old=torch.zeros(3), engine=-ratio.log()), tis_cap=2.0)
    assert out.loss.tolist() == pytest.approx([-0.5, -1.5, -2.0])
    assert torch.autograd.grad(out.loss.sum(), lp)[0].tolist() == pytest.approx([-0.5, -1.5, -2.0])
    assert out.metrics["ratio/tis_truncated_fraction"].tolist() == [0, 0, 1]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_gradient_of_the_kl_term_alone_is_that_of_finite_differences(estimator):
    """Fault A08: a KL term computed under no_grad pulls at nothing."""
    ref = torch.tensor([-1.0, -2.0, -0.3], dtype=torch.float64)
    lp = torch.tensor([-1.5, -1.2, -0.4], dtype=torch.float64, requires_grad=True)
    kl = partial(kl_estimate, ref_logprobs_M=ref, estimator=estimator)
    assert torch.autograd.gradcheck(kl, (lp,))
    (grad,) = torch.autograd.grad(kl(lp).sum(), lp)
    assert (grad.abs() > 1e-3).all()

    alone = loss_inputs(lp.detach().float().requires_grad_(), advantages=[0.0] * 3, ref=ref)
    out = policy_loss(alone, kl_coef=0.5, kl_estimator=estimator)
    (in_loss,) = torch.autograd.grad(out.loss.sum(), alone.logprobs)
    torch.testing.assert_close(in_loss.double(), 0.5 * grad, rtol=1e-5, atol=1e-6)


def test_kl_estimators_have_their_known_values_and_stay_finite():
    lp, ref = torch.tensor([-1.0, 0.0]), torch.tensor([-0.5, -200.0])
    assert kl_estimate(lp, ref, estimator="k1").tolist() == pytest.approx([-0.5, 200.0])
    assert kl_estimate(lp, ref, estimator="k2").tolist() == pytest.approx([0.125, 20000.0])
    assert kl_estimate(lp, ref, estimator="k3")[0].item() == pytest.approx(torch.tensor(0.5).exp().item() - 1.5)
    assert kl_estimate(ref, lp, estimator="k3").isfinite().all()


def test_the_mean_of_k3_over_samples_is_the_exact_kl():
    torch.manual_seed(0)
    p, q = torch.randn(6).log_softmax(0), torch.randn(6).log_softmax(0)
    tokens = torch.multinomial(p.exp(), 200_000, replacement=True)
    estimate = kl_estimate(p[tokens], q[tokens], estimator="k3").mean()
    assert estimate.item() == pytest.approx((p.exp() * (p - q)).sum().item(), rel=0.02)


def test_the_entropy_bonus_raises_entropy():
    entropy = torch.tensor([1.0, 2.0], requires_grad=True)
    out = policy_loss(loss_inputs([-1.0, -2.0], advantages=[0.0, 0.0], entropy=entropy), entropy_coef=0.1)
    assert torch.autograd.grad(out.loss.sum(), entropy)[0].tolist() == pytest.approx([-0.1, -0.1])


def test_sft_is_the_negative_log_likelihood_times_the_weight():
    out = sft_loss(loss_inputs([-1.0, -2.0], advantages=[1.0, 0.5]))
    assert out.loss.tolist() == [1.0, 1.0]


def test_a_loss_is_found_by_its_import_string_or_refused_with_the_reason():
    assert resolve_loss(LossConfig(kind="miles_train.losses:policy_loss")) is policy_loss
    with pytest.raises(ConfigError, match="no module 'nowhere'"):
        resolve_loss(LossConfig(kind="nowhere.at:all"))
    with pytest.raises(ConfigError, match="no 'gspo'"):
        resolve_loss(LossConfig(kind="miles_train.losses:gspo"))
    with pytest.raises(ConfigError, match="a int that cannot be called"):
        resolve_loss(LossConfig(kind="miles_train.packing:ATTENTION_TOKENS"))


@needs("reference")
def penalty(inputs: LossInputs, *, coef: float = 0.1, entropy: bool = False) -> TokenLoss:
    return TokenLoss(-coef * inputs.logprobs)


def restless(inputs: LossInputs) -> TokenLoss:
    return TokenLoss(inputs.logprobs)


restless.needs = {"gradient"}  # pyright: ignore[reportFunctionMemberAccess]


def test_arguments_of_a_loss_of_ones_own_are_bound_and_compared_with_its_signature():
    own = CustomLoss(kind=f"{__name__}:penalty", args={"coef": 0.5})
    assert resolve_loss(own)(loss_inputs([-2.0])).loss.tolist() == [1.0]
    assert own == LossConfig(kind=f"{__name__}:penalty", args={"coef": 0.5})
    with pytest.raises(ConfigError, match=r"takes \(inputs: .*unexpected keyword argument 'coeff'"):
        resolve_loss(replace(own, args={"coeff": 0.5}))


def test_a_loss_says_what_it_needs():
    assert CustomLoss(kind=f"{__name__}:penalty").needs == {"reference"}
    assert CustomLoss(kind="miles_train.losses:policy_loss").needs == frozenset()
    assert SftLoss().needs == PolicyLoss().needs == frozenset()
    assert PolicyLoss(kl_coef=0.1).needs == {"reference"}
    assert PolicyLoss(entropy_coef=0.1, old_logprobs="trainer").needs == {"entropy", "old_logprobs"}
    with pytest.raises(ConfigError, match=r"`needs` of .*:restless is \['gradient'\]; it must be among reference"):
        resolve_loss(CustomLoss(kind=f"{__name__}:restless"))
    with pytest.raises(ConfigError, match="`needs` is 'gradient'; it must be one of reference, entropy"):
        needs("gradient")  # pyright: ignore[reportArgumentType]


def test_the_policy_config_reaches_the_loss():
    fn = resolve_loss(LossConfig(clip_high=0.5, old_logprobs="trainer", tis_cap=1.5))
    out = fn(loss_inputs(torch.tensor([2.0]).log(), old=[0.0], engine=[-5.0]))
    assert out.loss.tolist() == pytest.approx([-1.5 * 1.5])
