"""What an engine computes from its parameters and keeps: made anew after every commit, and checked.

SGLang calls a model's `post_load_weights` after its own loading and skips it after a custom load, so the receiver calls
it: DeepSeek's multi-head latent attention keeps the two halves of `kv_b_proj` as `w_kc` and `w_vc`, which would
otherwise stay those of the old weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import cast

import torch

from .live import DRAFT, checksum


def refresh(models: Mapping[str, torch.nn.Module]) -> None:
    """Call the post-load hook of every model that has one."""
    for model in models.values():
        hook = cast("Callable[[], None] | None", getattr(model, "post_load_weights", None))
        if hook is not None:
            with torch.no_grad():
                hook()


def checksums(models: Mapping[str, torch.nn.Module]) -> dict[str, str]:
    """Checksum of every tensor that a module keeps and that is neither parameter nor buffer."""
    return {name: checksum(tensor) for name, tensor in _derived(models)}


def stale(models: Mapping[str, torch.nn.Module]) -> list[str]:
    """Derived tensors that come out differently when made again from the live parameters. Leaves them made anew."""
    before = checksums(models)
    refresh(models)
    after = checksums(models)
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))


def _derived(models: Mapping[str, torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    for role, model in models.items():
        for path, module in cast("Iterable[tuple[str, torch.nn.Module]]", model.named_modules()):
            for name, value in vars(module).items():
                if isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_meta:
                    yield f"{'' if role == 'target' else DRAFT}{path}.{name}".lstrip("."), value
