"""Numbers on a GPU against the same numbers on the CPU, which the other tests check."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.gpu


def test_chunked_logprobs_and_their_gradients_agree_with_the_cpu():
    from miles_train.logprobs import token_logprobs

    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(257, 64, generator=generator), torch.randn(1009, 64, generator=generator) * 0.1
    targets = torch.randint(0, 1009, (257,), generator=generator)
    results: dict[str, tuple[torch.Tensor, ...]] = {}
    for device in ("cpu", "cuda"):
        h = hidden.to(device).requires_grad_()
        w = weight.to(device).requires_grad_()
        scores = token_logprobs(
            h, w, targets.to(device), temperature_M=torch.full((257,), 0.7, device=device), chunk_bytes=1 << 18
        )
        scores.logprobs.sum().backward()
        assert h.grad is not None
        assert w.grad is not None
        results[device] = (scores.logprobs.detach().cpu(), h.grad.cpu(), w.grad.cpu())

    for expected, computed in zip(results["cpu"], results["cuda"], strict=True):
        assert torch.allclose(computed, expected, rtol=1e-4, atol=1e-4)
