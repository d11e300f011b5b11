"""SGLang's checksum of a parameter on a GPU, in plain PyTorch.

Origin: `sglang/kernels/ops/memory/gpu_tensor_hash.py` of SGLang 0.5.23, a Triton kernel. The bytes are read as 32-bit
words; each word is mixed with its position (murmur3's finaliser), words are summed per tile of 8192, tiles are mixed
with the length, summed in 64 bits and finalised (splitmix64). Compared here with a scalar transcription, not yet with
the kernel itself: that needs a GPU.
"""

from __future__ import annotations

import torch

_TILE_WORDS = 8192
_SEED = 0x243F6A88
_SEEDS = (_SEED, ((_SEED * 0x9E3779B1) ^ 0xDEADBEEF) & 0xFFFFFFFF)
_POSITION = (0x27D4EB2D, 0x165667B1)
_ROTATE = (15, 13)
_MIX = (0x85EBCA6B, 0xC2B2AE35)
_MASK32 = 0xFFFFFFFF
_MASK64 = (1 << 64) - 1


class TileHash:
    """The checksum of a byte string that arrives in pieces and whose length is known before."""

    def __init__(self, total_bytes: int) -> None:
        self._num_words = -(-total_bytes // 4)
        self._next_word = 0
        self._pending = torch.empty(0, dtype=torch.uint8)
        self._sum = 0

    def update(self, data: torch.Tensor) -> None:
        """Take the next bytes, a flat uint8 tensor on any device."""
        if self._pending.numel():
            data = torch.cat([self._pending.to(data.device), data])
        whole = data.numel() // (4 * _TILE_WORDS) * (4 * _TILE_WORDS)
        for start in range(0, whole, 4 * _TILE_WORDS * 256):  # bounds the temporaries
            self._take(data[start : min(start + 4 * _TILE_WORDS * 256, whole)])
        self._pending = data[whole:].clone()

    def hexdigest(self) -> str:
        """Sixteen hexadecimal digits, as the engine prints them."""
        if self._num_words == 0:
            return f"{0:016x}"
        if self._pending.numel():
            self._take(torch.nn.functional.pad(self._pending, (0, -self._pending.numel() % 4)))
            self._pending = self._pending[:0]
        x = self._sum
        x ^= x >> 30
        x = (x * 0xBF58476D1CE4E5B9) & _MASK64
        x ^= x >> 27
        x = (x * 0x94D049BB133111EB) & _MASK64
        return f"{x ^ (x >> 31):016x}"

    def _take(self, data: torch.Tensor) -> None:
        words = data.clone().view(torch.int32) if data.storage_offset() % 4 else data.view(torch.int32)
        values = words.to(torch.int64) & _MASK32
        index = torch.arange(self._next_word, self._next_word + values.numel(), device=data.device) & _MASK32
        halves_T = [self._tile_sums(values, index, which) for which in (0, 1)]
        # int64 additions wrap like the kernel's uint64 ones.
        self._sum = (self._sum + int(((halves_T[0] << 32) | halves_T[1]).sum().item())) & _MASK64
        self._next_word += values.numel()

    def _tile_sums(self, values: torch.Tensor, index: torch.Tensor, which: int) -> torch.Tensor:
        bits = _ROTATE[which]
        rotated = ((index << bits) & _MASK32) | (index >> (32 - bits))
        position = ((index * _POSITION[which] + _SEEDS[which]) & _MASK32) ^ rotated
        mixed = _finalise(values ^ position)
        tiles = torch.nn.functional.pad(mixed, (0, -mixed.numel() % _TILE_WORDS)).view(-1, _TILE_WORDS)
        return _finalise((tiles.sum(dim=1) & _MASK32) ^ (self._num_words * 4 & _MASK32))


def _finalise(x: torch.Tensor) -> torch.Tensor:
    x = x ^ (x >> 16)
    x = (x * _MIX[0]) & _MASK32
    x = x ^ (x >> 13)
    x = (x * _MIX[1]) & _MASK32
    return x ^ (x >> 16)
