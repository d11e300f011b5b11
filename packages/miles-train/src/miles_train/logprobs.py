"""Log-probs of chosen tokens from hidden states, without ever holding all logits.

Subscripts: M tokens to score, H hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class TokenScores(NamedTuple):
    """What `token_logprobs` says of each scored token."""

    logprobs: Tensor
    """[M] float32, log p(target)."""
    entropy: Tensor | None
    """[M] float32, of the whole distribution, None unless asked for."""


def token_logprobs(
    hidden_MH: Tensor,
    weight_VH: Tensor,
    targets_M: Tensor,
    *,
    temperature_M: Tensor,
    bias_V: Tensor | None = None,
    entropy: bool = False,
    chunk_bytes: int = 256 << 20,
) -> TokenScores:
    """log softmax(hidden @ weight.T / temperature)[target], float32, with gradients to hidden, weight and bias.

    At most `chunk_bytes` of float32 logits exist at a time, in the forward and in the backward pass; where
    everything fits one chunk its probabilities are kept for the backward pass instead of computed again.
    """
    rows = max(1, chunk_bytes // (4 * weight_VH.shape[0]))
    logprobs, entropies = _TokenLogprobs.apply(
        hidden_MH, weight_VH, bias_V, targets_M, temperature_M.float(), entropy, rows
    )
    return TokenScores(logprobs, entropies if entropy else None)


class _TokenLogprobs(torch.autograd.Function):
    """d logp[target] / d z = onehot - p;  d H / d z = -p (log p + H);  z = logits / temperature."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: Tensor,
        entropy: bool,
        rows: int,
    ) -> tuple[Tensor, Tensor]:
        out = hidden.new_empty(len(hidden), dtype=torch.float32)
        entropies = torch.zeros_like(out)
        kept = None
        for part in _parts(len(hidden), rows):
            logp = _log_softmax(hidden[part], weight, bias, temperature[part])
            out[part] = logp.gather(1, targets[part, None])[:, 0]
            if entropy:
                entropies[part] = -(logp.exp() * logp).sum(1)
            if len(hidden) <= rows:
                kept = logp
        ctx.save_for_backward(hidden, weight, bias, targets, temperature, entropies if entropy else None, kept)
        ctx.rows = rows
        if not entropy:
            ctx.mark_non_differentiable(entropies)
        return out, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_logp, grad_entropy = grads
        hidden, weight, bias, targets, temperature, entropies, kept = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        # summed over chunks in float32: a bfloat16 sum over many chunks loses small terms
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None else None
        for part in _parts(len(hidden), ctx.rows):
            logp = kept if kept is not None else _log_softmax(hidden[part], weight, bias, temperature[part])
            grad = _grad_logits(logp, targets[part], grad_logp[part])
            if entropies is not None:
                grad -= logp.exp() * (logp + entropies[part, None]) * grad_entropy[part, None]
            grad = (grad / temperature[part, None]).to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = grad @ weight
            if grad_weight is not None:
                grad_weight += grad.T @ hidden[part]
            if grad_bias is not None:
                grad_bias += grad.sum(0)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(hidden.dtype),
            *(None,) * 4,
        )


def _parts(total: int, rows: int) -> list[slice]:
    return [slice(start, min(start + rows, total)) for start in range(0, total, rows)]


def _log_softmax(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: Tensor) -> Tensor:
    logits = torch.nn.functional.linear(hidden, weight, bias).float()
    return torch.log_softmax(logits.div_(temperature[:, None]), dim=-1)


def _grad_logits(logp: Tensor, targets: Tensor, grad: Tensor) -> Tensor:
    """(onehot - p) · grad, in one buffer."""
    out = logp.exp().mul_(-grad[:, None])
    return out.scatter_add_(1, targets[:, None], grad[:, None])
