"""Checksums and engine facts against independent transcriptions."""

from __future__ import annotations

import pytest
import torch
from miles_weightsync.engine import _resolve_dtype as resolve_dtype
from miles_weightsync.engine import is_local
from miles_weightsync.engine_layouts import Division, local_block, local_shape, locate
from miles_weightsync.tile_hash import TileHash

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


def test_key_value_heads_are_shared_when_there_are_fewer_than_ranks() -> None:
    place = locate("model.layers.0.self_attn.k_proj.weight")
    assert place is not None
    whole = torch.arange(8.0).view(8, 1)  # 2 heads of 4 rows
    division = Division(tp=4, num_kv_heads=2, on_gpu=True)
    blocks = [local_block(whole, place, division, rank=rank)[:, 0].tolist() for rank in range(4)]
    assert blocks == [[0, 1, 2, 3], [0, 1, 2, 3], [4, 5, 6, 7], [4, 5, 6, 7]]


@pytest.mark.parametrize(("vocab", "tp"), [(10, 1), (64, 2), (130, 2), (100, 3)])
def test_embeddings_are_padded_with_zero_rows_to_the_shape_of_the_engine(vocab: int, tp: int) -> None:
    place = locate("lm_head.weight")
    assert place is not None
    whole = torch.ones(vocab, 2)
    division = Division(tp=tp, num_kv_heads=None, on_gpu=True)
    blocks = [local_block(whole, place, division, rank=rank) for rank in range(tp)]
    assert {tuple(b.shape) for b in blocks} == {local_shape((vocab, 2), place, division)}
    joined = torch.cat(blocks)
    assert joined.shape[0] % 64 == 0
    assert joined[:, 0].sum() == vocab


def test_the_mlp_is_padded_on_a_cpu_and_not_on_a_gpu() -> None:
    place = locate("model.layers.0.mlp.down_proj.weight")
    assert place is not None
    whole = torch.ones(2, 96)
    on_cpu = [local_block(whole, place, Division(tp=2, num_kv_heads=2, on_gpu=False), rank=rank) for rank in (0, 1)]
    assert [(block.shape[1], int(block[0].sum())) for block in on_cpu] == [(64, 64), (64, 32)]
    on_gpu = [local_block(whole, place, Division(tp=2, num_kv_heads=2, on_gpu=True), rank=rank) for rank in (0, 1)]
    assert [block.shape[1] for block in on_gpu] == [48, 48]


def test_rotary_tables_are_ignored_and_bare_names_get_their_prefix() -> None:
    assert locate("model.layers.0.self_attn.rotary_emb.inv_freq") is None
    place = locate("layers.3.mlp.up_proj.weight")
    assert place is not None
    assert (place.param, place.index, place.count) == ("model.layers.3.mlp.gate_up_proj.weight", 1, 2)


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
