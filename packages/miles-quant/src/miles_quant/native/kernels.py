from __future__ import annotations


def quantize(format, weight, amax):
    return None


def dequantize(format, quantized, dtype):
    return None
