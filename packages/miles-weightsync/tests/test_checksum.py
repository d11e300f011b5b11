"""Checksums and engine facts against independent transcriptions."""

from __future__ import annotations

import hashlib
import random
from dataclasses import replace

import pytest
import torch
from miles_weightsync.buckets import Bucket, make_buckets
from miles_weightsync.checksum import EngineLayout, ExpectedChecksums
from miles_weightsync.engine import _resolve_dtype as resolve_dtype
from miles_weightsync.engine import is_local
from miles_weightsync.layout import ShardSpec
from miles_weightsync.parameter_hash import ParameterHash
from miles_weightsync.planner import ModelShape, Part, SGLang
from miles_weightsync.tile_hash import TileHash
from planner_models import DENSE, DSA, GLM, LATENT_Q, MLA, MOE, QWEN2

MASK = 0xFFFFFFFF


def scalar_tile_hash(data: bytes) -> str:
    """SGLang's GPU hash, word by word, for inputs of one tile or more."""

    def mix(x: int) -> int:
        x ^= x >> 16
        x = x * 0x85EBCA6B & MASK
        x ^= x >> 13
        x = x * 0xC2B2AE35 & MASK
        return x ^ (x >> 16)

    def rotate(x: int, bits: int) -> int:
        return (x << bits | x >> (32 - bits)) & MASK

    data += bytes(-len(data) % 4)
    words = [int.from_bytes(data[i : i + 4], "little") for i in range(0, len(data), 4)]
    seeds = (0x243F6A88, (0x243F6A88 * 0x9E3779B1 ^ 0xDEADBEEF) & MASK)
    total = 0
    for tile in range(0, len(words), 8192):
        h1 = h2 = 0
        for i in range(tile, min(tile + 8192, len(words))):
            h1 = (h1 + mix(words[i] ^ ((i * 0x27D4EB2D + seeds[0]) & MASK ^ rotate(i, 15)))) & MASK
            h2 = (h2 + mix(words[i] ^ ((i * 0x165667B1 + seeds[1]) & MASK ^ rotate(i, 13)))) & MASK
        n = len(words) * 4 & MASK
        total = (total + (mix(h1 ^ n) << 32 | mix(h2 ^ n))) & (1 << 64) - 1
    total ^= total >> 30
    total = total * 0xBF58476D1CE4E5B9 & (1 << 64) - 1
    total ^= total >> 27
    total = total * 0x94D049BB133111EB & (1 << 64) - 1
    return f"{total ^ (total >> 31):016x}"


@pytest.mark.parametrize("nbytes", [1, 4, 4 * 8192, 4 * 8192 * 2 + 6])
def test_the_tile_hash_is_the_same_in_pieces_and_as_a_scalar_loop(nbytes: int) -> None:
    data = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(nbytes))
    for cut in (0, nbytes // 3, nbytes):
        hasher = TileHash(nbytes)
        hasher.update(data[:cut])
        hasher.update(data[cut:])
        assert hasher.hexdigest() == scalar_tile_hash(bytes(data.tolist()))


FAMILIES = {"dense": DENSE, "qwen2": QWEN2, "moe": MOE, "glm": GLM, "mla": MLA, "dsa": DSA, "latent_q": LATENT_Q}


def tensors_of(model: ModelShape) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {t.name: torch.randn(t.shape, generator=generator).to(getattr(torch, t.dtype)) for t in model.tensors()}


def live(layout: SGLang, rank: int, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The parameters of one rank, whole: what an engine would hold."""
    found = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in layout.params(rank).items()}
    for part in layout.parts(rank):
        if part.model == "target":
            block = tensors[part.name][tuple(slice(*span) for span in part.box)]
            param = found[part.param] = found[part.param].to(block.dtype)
            param[part.slices(part.box)] = block
    return found


def sha(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def pushed(layout: SGLang, tensors: dict[str, torch.Tensor], *, seed: int) -> ExpectedChecksums:
    """What an engine is expected to say after buckets in an order that nobody would choose."""
    specs = [
        ShardSpec(n, tuple(t.shape), str(t.dtype).removeprefix("torch."), tuple((0, s) for s in t.shape))
        for n, t in tensors.items()
    ]
    kept = layout.model.always_float32()
    buckets = list(make_buckets([specs], bucket_bytes=2000, dtype="bfloat16", kept=kept))
    random.Random(seed).shuffle(buckets)
    facts = EngineLayout(model=layout, tp=layout.tp, replicas=1, on_gpu=False, dtype="bfloat16")
    expected = ExpectedChecksums(facts)
    for bucket in buckets:
        expected.add(bucket, staged(bucket, tensors))
    return expected


def staged(bucket: Bucket, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    data = torch.zeros(bucket.nbytes, dtype=torch.uint8)
    for slot in bucket.slots:
        source = tensors[slot.name].to(getattr(torch, slot.dtype)).contiguous()
        data[slot.start : slot.stop] = source.reshape(-1).view(torch.uint8)
    return data


@pytest.mark.parametrize(("tp", "on_gpu"), [(1, True), (2, True), (4, True), (1, False), (2, False)])
@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_hashed_as_they_lie_in_the_engine_whatever_order_buckets_come_in(
    family: str, tp: int, on_gpu: bool
) -> None:
    model = FAMILIES[family]
    layout = SGLang(model=model, tp=tp, on_gpu=on_gpu)
    tensors = tensors_of(replace(model, dtype="float32"))
    as_held = {n: t if n in model.always_float32() else t.bfloat16() for n, t in tensors.items()}
    reported_R = [{n: sha(t) for n, t in live(layout, rank, as_held).items()} for rank in range(tp)]
    comparison = pushed(layout, tensors, seed=tp).compare(reported_R)
    assert comparison.problems == ()
    assert comparison.num_unknown == 0
    assert comparison.num_equal == sum(len(reported) for reported in reported_R)


def test_one_changed_value_of_one_expert_is_found_and_named() -> None:
    layout, tensors = SGLang(model=MOE, tp=2), tensors_of(MOE)
    reported_R = [{n: sha(t) for n, t in live(layout, rank, tensors).items()} for rank in range(2)]
    tensors["model.layers.1.mlp.experts.1.up_proj.weight"][0, 0] += 1
    problems = pushed(layout, tensors, seed=0).compare(reported_R).problems
    assert len(problems) == 1
    assert "differ on rank 0: model.layers.1.mlp.experts.w13_weight" in problems[0]


def test_what_was_not_pushed_or_only_in_part_and_what_nobody_knows_is_named() -> None:
    layout, tensors = SGLang(model=DENSE), tensors_of(DENSE)
    reported = {name: sha(tensor) for name, tensor in live(layout, 0, tensors).items()}
    del tensors["model.layers.0.self_attn.k_proj.weight"]
    tensors["model.layers.0.mlp.oddity.weight"] = torch.zeros(2, 2)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(2)  # engines make their own
    problems = pushed(layout, tensors, seed=0).compare([reported]).problems
    assert problems == (
        "1 parameters of the engine were not pushed: model.layers.0.self_attn.qkv_proj.weight",
        "1 pushed parameters do not exist in the engine: model.layers.0.mlp.oddity.weight",
    )


def test_a_head_that_the_engine_ties_must_equal_the_embedding() -> None:
    model = replace(DENSE, tied=True)
    layout, tensors = SGLang(model=model), tensors_of(model)
    reported = {name: sha(tensor) for name, tensor in live(layout, 0, tensors).items()}
    assert "lm_head.weight" not in reported
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    assert pushed(layout, tensors, seed=0).compare([reported]).problems == ()
    tensors["lm_head.weight"][0, 0] += 1
    [problem] = pushed(layout, tensors, seed=0).compare([reported]).problems
    assert problem == "1 pushed parameters do not exist in the engine: lm_head.weight"


@pytest.mark.parametrize("on_gpu", [False, True])
def test_parts_of_a_parameter_may_come_late_and_leave_padding(on_gpu: bool) -> None:
    param = torch.zeros(3, 5, 4, dtype=torch.int16)
    parts = [
        Part("a", ((0, 2), (0, 3)), "p", (3, 5, 4), (0, 0, 0)),
        Part("b", ((0, 1), (0, 4)), "p", (3, 5, 4), (0, 4, 0)),
        Part("c", ((1, 4), (0, 4)), "p", (3, 5, 4), (2, 1, 0)),
    ]
    hash = ParameterHash((3, 5, 4), parts, on_gpu=on_gpu, item_bytes=2)
    for number, part in enumerate(reversed(parts), 1):
        block = torch.full([stop - start for start, stop in part.box], number, dtype=torch.int16)
        param[part.slices(part.box)] = block
        assert hash.add(part, block) is (number == 3)
    data = param.numpy().tobytes()
    assert hash.hexdigest() == (scalar_tile_hash(data) if on_gpu else hashlib.sha256(data).hexdigest()[:16])


def test_the_type_of_an_engine_follows_its_rule_for_auto() -> None:
    assert resolve_dtype("bfloat16", {}) == "bfloat16"
    assert resolve_dtype("half", {}) == "float16"
    assert resolve_dtype("auto", {"model_type": "qwen3", "dtype": "float32"}) == "float16"
    assert resolve_dtype("auto", {"model_type": "qwen3", "torch_dtype": "bfloat16"}) == "bfloat16"
    assert resolve_dtype("auto", {"model_type": "gemma3", "dtype": "float32"}) is None
    assert resolve_dtype("auto", {}) is None


def test_local_addresses_are_told_from_others() -> None:
    assert is_local("http://127.0.0.1:30000")
    assert is_local("http://localhost:1")
    assert not is_local("http://192.0.2.1:30000")
    assert not is_local("http://no-such-host.invalid:1")
