"""Chunked log-probs and their gradients equal the dense computation."""

from __future__ import annotations

import pytest
import torch
from miles_train.logprobs import token_logprobs

M, H, V = 13, 8, 31


def inputs(*, bias: bool = False, dtype: torch.dtype = torch.float32):
    torch.manual_seed(0)
    hidden = torch.randn(M, H, dtype=dtype, requires_grad=True)
    weight = torch.randn(V, H, dtype=dtype, requires_grad=True)
    extra = torch.randn(V, dtype=dtype, requires_grad=True) if bias else None
    return hidden, weight, extra, torch.randint(V, (M,)), torch.linspace(0.4, 1.7, M)


def dense(hidden, weight, bias, targets, temperature):
    logp = (torch.nn.functional.linear(hidden, weight, bias) / temperature[:, None]).log_softmax(-1)
    return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 4, 13, 100])
def test_values_and_gradients_equal_the_dense_computation_for_every_chunk(rows, bias):
    *leaves, targets, temperature = inputs(bias=bias)
    leaves = [leaf for leaf in leaves if leaf is not None]
    hidden, weight, *rest = leaves
    logprobs, entropy = token_logprobs(
        hidden,
        weight,
        targets,
        temperature_M=temperature,
        bias_V=rest[0] if rest else None,
        entropy=True,
        chunk_bytes=rows * 4 * V,
    )
    expected, expected_entropy = dense(hidden, weight, rest[0] if rest else None, targets, temperature)
    torch.testing.assert_close(logprobs, expected)
    torch.testing.assert_close(entropy, expected_entropy)

    mix = torch.randn(M), torch.randn(M)
    got = torch.autograd.grad((logprobs * mix[0] + entropy * mix[1]).sum(), leaves)
    wanted = torch.autograd.grad((expected * mix[0] + expected_entropy * mix[1]).sum(), leaves)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_gradients_match_finite_differences():
    hidden, weight, _, targets, temperature = inputs(dtype=torch.float64)

    def scores(h, w):
        # the softmax is float32 by design, so the steps are coarse
        out = token_logprobs(h, w, targets, temperature_M=temperature, entropy=True, chunk_bytes=5 * 4 * V)
        return out.logprobs.double(), out.entropy.double()

    assert torch.autograd.gradcheck(scores, (hidden, weight), eps=1e-2, atol=2e-2, rtol=2e-2)


def test_no_more_than_one_chunk_of_logits_is_ever_held():
    class Largest(torch.overrides.TorchFunctionMode):
        numel = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                Largest.numel = max(Largest.numel, out.numel())
            return out

    hidden, weight, _, targets, temperature = inputs()
    with Largest():
        out = token_logprobs(hidden, weight, targets, temperature_M=temperature, chunk_bytes=4 * 4 * V)
        out.logprobs.sum().backward()
    assert Largest.numel <= max(4 * V, V * H)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.4])
def test_log_probs_at_the_sampling_temperature_give_a_ratio_of_one(temperature):
    """Fault T09: scored at another temperature, the ratio is about 2 at T = 0.6."""
    hidden, weight, _, targets, _ = inputs()
    sampled_at = (hidden @ weight.T / temperature).log_softmax(-1).gather(1, targets[:, None])[:, 0].detach()
    out = token_logprobs(hidden, weight, targets, temperature_M=torch.full((M,), temperature))
    torch.testing.assert_close((out.logprobs - sampled_at).exp(), torch.ones(M), rtol=0, atol=2e-6)


def test_sixteen_bit_hidden_states_still_get_a_float32_softmax():
    hidden, weight, _, targets, temperature = inputs(dtype=torch.bfloat16)
    out = token_logprobs(hidden, weight, targets, temperature_M=temperature, entropy=True)
    logits = (hidden @ weight.T).float() / temperature[:, None]
    torch.testing.assert_close(out.logprobs, logits.log_softmax(-1).gather(1, targets[:, None])[:, 0])
    grads = torch.autograd.grad(out.logprobs.sum(), (hidden, weight))
    assert [g.dtype for g in grads] == [torch.bfloat16, torch.bfloat16]
