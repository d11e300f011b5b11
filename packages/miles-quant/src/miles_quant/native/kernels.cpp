// The formats of ../formats, bit for bit: the formulas stand there, with their sources. Compiled once for every
// instruction set with MQ_ISA naming it; dispatch.cpp picks one.
#include "kernels.h"

#include "vectors.h"

namespace {

// ---- MXFP8 and MXFP4: blocks of 32, a power of two each

INLINE uint32_t mx_exponent(uint32_t amax, bool is_fp8, MxRule rule) {
  if (amax > kInf) return 255;
  if (rule == kRceil) {
    if (amax == kInf) return 254;
    uint32_t bits = cast<uint32_t>(cast<float>(amax) * (is_fp8 ? 1.0f / 448.0f : 1.0f / 6.0f));
    uint32_t exponent = bits >> 23, mantissa = bits & 0x7FFFFFu;
    return exponent + (exponent == 0 ? mantissa > 0x400000u : mantissa > 0 && exponent < 254);
  }
  uint32_t rounded = rule == kEven ? amax + (is_fp8 ? 1u << 19 : 1u << 21) : amax;
  int32_t exponent = int32_t(rounded >> 23 & 0xFF) - (is_fp8 ? 8 : 2);
  return exponent < 0 ? 0 : uint32_t(exponent);
}

INLINE float power_of_two(uint32_t exponent) {
  return cast<float>(exponent == 255 ? kNan : exponent == 0 ? 0x00400000u : exponent << 23);
}

template <class T, bool is_fp8>
void mx_quantize(const T *x, uint8_t *codes, uint8_t *scales, int64_t blocks, MxRule rule) {
  for (int64_t b = 0; b < blocks; b++, x += 32) {
    f32x16 low = load16(x), high = load16(x + 16);
    uint32_t exponent = mx_exponent(largest(larger(magnitude(low), magnitude(high))), is_fp8, rule);
    scales[b] = uint8_t(exponent);
    float factor = power_of_two(exponent == 255 ? 255 : 254 - exponent);
    if (is_fp8) {
      store_bytes(codes + b * 32, e4m3_codes(clamp(low * factor, 448.0f)));
      store_bytes(codes + b * 32 + 16, e4m3_codes(clamp(high * factor, 448.0f)));
    } else {
      store_nibbles(codes + b * 16, e2m1_codes(clamp(low * factor, 6.0f)));
      store_nibbles(codes + b * 16 + 8, e2m1_codes(clamp(high * factor, 6.0f)));
    }
  }
}

template <class T, bool is_fp8>
void mx_dequantize(const uint8_t *codes, const uint8_t *scales, T *out, int64_t blocks) {
  for (int64_t b = 0; b < blocks; b++)
    for (int half = 0; half < 2; half++) {
      f32x16 value = is_fp8 ? e4m3_values(load_bytes(codes + b * 32 + half * 16))
                            : e2m1_values(load_nibbles(codes + b * 16 + half * 8));
      store16(out + b * 32 + half * 16, value * power_of_two(scales[b]));
    }
}

// ---- The largest magnitude, and FP8 in any block whose columns are whole vectors

struct Fp8Scale {
  float stored, operand;
  bool divides;
};

INLINE Fp8Scale fp8_scale(float amax, Fp8Rule rule) {
  if (is_nan(amax)) return {cast<float>(kNan), cast<float>(kNan), false};
  if (rule == kDiv) {
    float scale = amax / 448.0f;
    scale = scale == 0 ? 1.0f : scale;
    return {scale, scale, true};
  }
  if (rule == kMiles) {
    float scale = (amax < 1e-10f ? 1e-10f : amax) / 448.0f;
    return {scale, 1.0f / scale, false};
  }
  float encode = 448.0f / amax;
  encode = encode > kFloatMax ? kFloatMax : encode;
  if (rule == kTePow2) encode = cast<float>(cast<uint32_t>(encode) & 0x7F800000u);
  encode = amax == 0 || encode == 0 ? 1.0f : encode;
  return {1.0f / encode, encode, false};
}

template <class T>
uint32_t amax_of(const T *x, int64_t rows, int64_t columns, int64_t stride) {
  u32x16 best = {}, other = {};
  for (int64_t r = 0; r < rows; r++) {
    int64_t c = 0;
    for (; c + 32 <= columns; c += 32) {
      best = larger(best, magnitude(load16(x + r * stride + c)));
      other = larger(other, magnitude(load16(x + r * stride + c + 16)));
    }
    for (; c < columns; c += 16) best = larger(best, magnitude(load16(x + r * stride + c)));
  }
  return largest(larger(best, other));
}

template <class T>
void row_amax(const T *x, float *amax, int64_t rows, int64_t columns) {
  for (int64_t r = 0; r < rows; r++) amax[r] = cast<float>(amax_of(x + r * columns, 1, columns, columns));
}

template <class T>
void fp8_quantize(const T *x, uint8_t *codes, float *scales, int64_t rows, int64_t columns, int64_t block_rows,
                  int64_t block_columns, Fp8Rule rule, const float *amax) {
  for (int64_t top = 0; top < rows; top += block_rows) {
    int64_t height = top + block_rows < rows ? block_rows : rows - top;
    for (int64_t left = 0; left < columns; left += block_columns) {
      const T *block = x + top * columns + left;
      Fp8Scale scale = fp8_scale(amax ? *amax : cast<float>(amax_of(block, height, block_columns, columns)), rule);
      *scales++ = scale.stored;
      f32x16 operand = splat(scale.operand);
      for (int64_t r = 0; r < height; r++)
        for (int64_t c = 0; c < block_columns; c += 16) {
          f32x16 value = load16(block + r * columns + c);
          value = scale.divides ? value / operand : value * operand;
          store_bytes(codes + (top + r) * columns + left + c, e4m3_codes(clamp(value, 448.0f)));
        }
    }
  }
}

template <class T>
void fp8_dequantize(const uint8_t *codes, const float *scales, T *out, int64_t rows, int64_t columns,
                    int64_t block_rows, int64_t block_columns) {
  int64_t width = columns / block_columns;
  for (int64_t r = 0; r < rows; r++)
    for (int64_t block = 0; block < width; block++) {
      float scale = scales[r / block_rows * width + block];
      int64_t start = r * columns + block * block_columns;
      for (int64_t c = start; c < start + block_columns; c += 16)
        store16(out + c, e4m3_values(load_bytes(codes + c)) * scale);
    }
}

// ---- NVFP4 by Transformer Engine's rule: blocks of 16, handled sixteen at a time where a row has so many

template <class T>
void nvfp4_blocks(const T *x, uint8_t *codes, uint8_t *scales, int blocks, float multiplier, float decode) {
  alignas(64) uint32_t amax[16] = {};
  alignas(64) float factor[16];
  for (int b = 0; b < blocks; b++) amax[b] = largest(magnitude(load16(x + b * 16)));
  u32x16 scale = e4m3_codes(clamp(cast<f32x16>(load<u32x16>(amax)) * multiplier, 448.0f));
  f32x16 encode = 1.0f / (e4m3_values(scale) * decode);
  encode = encode > splat(kFloatMax) ? splat(kFloatMax) : encode;
  memcpy(factor, &encode, sizeof encode);
  uint8_t bytes[16];
  store_bytes(bytes, scale);
  memcpy(scales, bytes, size_t(blocks));
  for (int b = 0; b < blocks; b++)
    store_nibbles(codes + b * 8, e2m1_codes(clamp(load16(x + b * 16) * factor[b], 6.0f)));
}

template <class T>
void nvfp4_quantize(const T *x, uint8_t *codes, uint8_t *scales, int64_t rows, int64_t columns,
                    const float *multipliers, const float *decodes, int64_t stride) {
  int64_t blocks = columns / 16;
  for (int64_t r = 0; r < rows; r++) {
    float multiplier = multipliers[r * stride], decode = decodes[r * stride];
    for (int64_t b = 0; b < blocks; b += 16) {
      int64_t at = r * blocks + b;
      int count = int(blocks - b < 16 ? blocks - b : 16);
      nvfp4_blocks(x + at * 16, codes + at * 8, scales + at, count, multiplier, decode);
    }
  }
}

template <class T>
void nvfp4_dequantize(const uint8_t *codes, const uint8_t *scales, T *out, int64_t rows, int64_t columns,
                      const float *decodes, int64_t stride) {
  int64_t blocks = columns / 16;
  for (int64_t r = 0; r < rows; r++)
    for (int64_t b = 0; b < blocks; b++) {
      int64_t at = r * blocks + b;
      uint32_t size = scales[at] & 0x7F;
      float scale = size == 0x7F ? cast<float>(kNan) : cast<float>(size << 20) * 0x1p120f;
      scale = scales[at] & 0x80 ? -scale : scale;
      store16(out + at * 16, e2m1_values(load_nibbles(codes + at * 8)) * (scale * decodes[r * stride]));
    }
}

// ---- INT4: groups whose columns are whole vectors

template <class T>
void int4_quantize(const T *x, uint8_t *codes, uint16_t *scales, int64_t groups, int64_t size) {
  const float nearest = 12582912.0f;  // 1.5 * 2^23: adding it leaves no room for a fraction
  for (int64_t g = 0; g < groups; g++, x += size) {
    float scale = cast<float>(amax_of(x, 1, size, size)) * (1.0f / 7.0f);
    scale = scale < 1e-5f ? 1e-5f : scale;
    scales[g] = to_bf16(scale);
    for (int64_t c = 0; c < size; c += 16) {
      f32x16 value = clamp(load16(x + c) / splat(scale), 7.0f);
      u32x16 code = cast<u32x16>(__builtin_convertvector((value + nearest) - nearest, i32x16)) + 8u;
      code = magnitude(value) > kInf ? splat_bits(8u) : code;
      store_nibbles(codes + (g * size + c) / 2, code & 15u);
    }
  }
}

template <class T>
void int4_dequantize(const uint8_t *codes, const uint16_t *scales, T *out, int64_t groups, int64_t size) {
  for (int64_t g = 0; g < groups; g++) {
    float scale = cast<float>(uint32_t(scales[g]) << 16);
    for (int64_t c = g * size; c < (g + 1) * size; c += 16)
      store16(out + c, __builtin_convertvector(cast<i32x16>(load_nibbles(codes + c / 2)) - 8, f32x16) * scale);
  }
}

}  // namespace

#define BY_TYPE(call)                     \
  do {                                    \
    if (is_bf16) {                        \
      using T = Bf16;                     \
      call;                               \
    } else {                              \
      using T = float;                    \
      call;                               \
    }                                     \
  } while (0)

const Kernels MQ_ISA = {
    [](const void *x, int is_bf16, float *amax, int64_t rows, int64_t columns) {
      BY_TYPE((row_amax((const T *)x, amax, rows, columns)));
    },
    [](const void *x, int is_bf16, uint8_t *codes, uint8_t *scales, int64_t blocks, int is_fp8, int rule) {
      if (is_fp8)
        BY_TYPE((mx_quantize<T, true>((const T *)x, codes, scales, blocks, MxRule(rule))));
      else
        BY_TYPE((mx_quantize<T, false>((const T *)x, codes, scales, blocks, MxRule(rule))));
    },
    [](const uint8_t *codes, const uint8_t *scales, void *out, int is_bf16, int64_t blocks, int is_fp8) {
      if (is_fp8)
        BY_TYPE((mx_dequantize<T, true>(codes, scales, (T *)out, blocks)));
      else
        BY_TYPE((mx_dequantize<T, false>(codes, scales, (T *)out, blocks)));
    },
    [](const void *x, int is_bf16, uint8_t *codes, float *scales, int64_t rows, int64_t columns, int64_t block_rows,
       int64_t block_columns, int rule, const float *amax) {
      BY_TYPE((fp8_quantize((const T *)x, codes, scales, rows, columns, block_rows, block_columns, Fp8Rule(rule),
                            amax)));
    },
    [](const uint8_t *codes, const float *scales, void *out, int is_bf16, int64_t rows, int64_t columns,
       int64_t block_rows, int64_t block_columns) {
      BY_TYPE((fp8_dequantize(codes, scales, (T *)out, rows, columns, block_rows, block_columns)));
    },
    [](const void *x, int is_bf16, uint8_t *codes, uint8_t *scales, int64_t rows, int64_t columns,
       const float *multipliers, const float *decodes, int64_t stride) {
      BY_TYPE((nvfp4_quantize((const T *)x, codes, scales, rows, columns, multipliers, decodes, stride)));
    },
    [](const uint8_t *codes, const uint8_t *scales, void *out, int is_bf16, int64_t rows, int64_t columns,
       const float *decodes, int64_t stride) {
      BY_TYPE((nvfp4_dequantize(codes, scales, (T *)out, rows, columns, decodes, stride)));
    },
    [](const void *x, int is_bf16, uint8_t *codes, uint16_t *scales, int64_t groups, int64_t size) {
      BY_TYPE((int4_quantize((const T *)x, codes, scales, groups, size)));
    },
    [](const uint8_t *codes, const uint16_t *scales, void *out, int is_bf16, int64_t groups, int64_t size) {
      BY_TYPE((int4_dequantize(codes, scales, (T *)out, groups, size)));
    },
};
