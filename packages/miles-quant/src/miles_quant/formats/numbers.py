"""Conversions between float32 and the small types E4M3, E2M1 and E8M0, bit for bit; FP4 codes packed in bytes.

Rounding is to nearest, ties to even, and saturates. NaN stays NaN where the type has one (E4M3 0x7F, E8M0 0xFF); E2M1
has none, so NaN takes code 0 there and the block's scale carries it.
"""

from __future__ import annotations

import torch

E4M3_MAX = 448.0
E2M1_MAX = 6.0
FLOAT_MAX = torch.finfo(torch.float32).max
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)

_DOWN = 2.0**-24
# A value above bound i has a code above i. Bounds whose tie goes up (to the even code) lie one ulp lower.
_E2M1_BOUNDS = (0.25, 0.75 * (1 - _DOWN), 1.25, 1.75 * (1 - _DOWN), 2.5, 3.5 * (1 - _DOWN), 5.0)


def to_e4m3(values: torch.Tensor) -> torch.Tensor:
    """Nearest E4M3 of float32 values, saturating at ±448; every NaN becomes 0x7F."""
    codes = values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return torch.where(values.isnan(), torch.full_like(codes.view(torch.uint8), 0x7F), codes.view(torch.uint8)).view(
        torch.float8_e4m3fn
    )


def to_e2m1(values: torch.Tensor) -> torch.Tensor:
    """Nearest E2M1 code (uint8, 0 to 15) of float32 values, saturating at ±6. The sign of zero is kept, as by `cvt`."""
    bounds = torch.tensor(_E2M1_BOUNDS, dtype=torch.float32, device=values.device)
    magnitude = torch.bucketize(values.abs().nan_to_num(nan=0.0).contiguous(), bounds, out_int32=True).to(torch.uint8)
    sign = (torch.signbit(values) & ~values.isnan()).to(torch.uint8)
    return magnitude | sign << 3


def from_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """float32 values of E2M1 codes 0 to 15."""
    return torch.tensor(E2M1_VALUES, dtype=torch.float32, device=codes.device)[codes.int()]


def from_e8m0(exponents: torch.Tensor) -> torch.Tensor:
    """2^(e - 127) in float32, exactly (2^-127 is a denormal); 255 is NaN."""
    wide = exponents.to(torch.int32)
    bits = torch.where(wide == 0, 0x0040_0000, wide << 23)
    return torch.where(wide == 255, 0x7FC0_0000, bits).to(torch.int32).view(torch.float32)


def reciprocal_e8m0(exponents: torch.Tensor) -> torch.Tensor:
    """2^(127 - e) in float32, exactly; 255 is NaN."""
    wide = exponents.to(torch.int32)
    return from_e8m0(torch.where(wide == 255, 255, 254 - wide))


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """[N, K] codes below 16 -> [N, ceil(K / 2)] bytes; the low nibble is the even column."""
    if codes.shape[1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return (codes[:, 0::2] | codes[:, 1::2] << 4).contiguous()


def unpack_nibbles(packed: torch.Tensor, columns: int) -> torch.Tensor:
    """The inverse of `pack_nibbles`: [N, ceil(K / 2)] -> [N, K]."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)[:, :columns]


def one_nan(values: torch.Tensor) -> torch.Tensor:
    """`values` with every NaN in one pattern, so that bytes can be compared."""
    return torch.where(values.isnan(), torch.full_like(values, torch.nan), values)


def divide(numerator: float, denominator: torch.Tensor) -> torch.Tensor:
    """`numerator / denominator`, rounded once. torch itself turns scalar / tensor into a multiplication by the
    reciprocal, which is off by one ulp in a quarter of the cases."""
    return torch.div(torch.full_like(denominator, numerator), denominator)
