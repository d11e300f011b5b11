"""Whether what is pushed fits the model that an engine serves; asked before the engine is touched.

SGLang loads weights in place: a tensor of a wrong shape ends its server, and what is missing shows in its checksums
when the old weights are gone.
"""

from __future__ import annotations

from collections.abc import Sequence

from .buckets import Bucket, torch_dtype
from .checksum import HEAD, EngineLayout, full_name, listed, places_of


def misfits(layout: EngineLayout, buckets: Sequence[Bucket], *, whole: bool) -> list[str]:
    """What does not fit, named; empty where everything does, or the layout is not known for sure.

    Args:
        whole: also name tensors that are missing, and those that the model does not have.
    """
    if layout.model is None or layout.model.model.fp8_block is not None:  # which layers a recipe left alone is unknown
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
    if whole:
        places_R = [places_of(layout.model, rank) for rank in range(layout.tp)]
        needed = {name for places in places_R for name in places.parts} - ({HEAD} if model.tied else set[str]())
        missing = needed - pushed.keys()
        surplus = {name for name in pushed if not places_R[0].knows(name)}
        found += listed(f"{len(missing)} tensors of the engine's model were not pushed", missing)
        found += listed(f"{len(surplus)} pushed tensors do not exist in the engine's model", surplus)
    return found
