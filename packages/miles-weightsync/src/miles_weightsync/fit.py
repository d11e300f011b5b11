"""Whether what is pushed fits the model that an engine serves; asked before the engine is touched.

SGLang loads weights in place, and a tensor of a wrong shape ends its server. What the engine has and did not get only
its own checksums tell: it need not have all that a checkpoint of its model has.
"""

from __future__ import annotations

from collections.abc import Sequence

from .buckets import Bucket, torch_dtype
from .checksum import HEAD, EngineLayout, full_name, listed, places_of


def misfits(layout: EngineLayout, buckets: Sequence[Bucket], *, surplus: bool) -> list[str]:
    """What does not fit, named; empty where everything does, or the engine's layout is not known.

    Args:
        surplus: also name tensors that the model does not have.
    """
    if layout.model is None:
        return []
    model = layout.model.model
    wanted = {tensor.name: tensor.shape for tensor in model.tensors()}
    if model.tied:
        wanted[HEAD] = (model.vocab_size, model.hidden_size)
    pushed = {full_name(slot.name): slot for bucket in buckets for slot in bucket.slots}
    shared = sorted(pushed.keys() & wanted.keys())
    shapes = [f"{n} {pushed[n].shape} instead of {wanted[n]}" for n in shared if pushed[n].shape != wanted[n]]
    types = [f"{n} {pushed[n].dtype}" for n in shared if not torch_dtype(pushed[n].dtype).is_floating_point]
    found = listed(f"{len(shapes)} tensors have another shape than in the engine's model", shapes)
    found += listed(f"{len(types)} tensors are no floating-point numbers", types)
    if surplus:
        known = places_of(layout.model, 0)
        extra = {name for name in pushed if not known.knows(name)}
        found += listed(f"{len(extra)} pushed tensors do not exist in the engine's model", extra)
    return found
