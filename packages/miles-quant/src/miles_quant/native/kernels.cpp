// The formats of ../formats, bit for bit: the formulas stand there, with their sources. Compiled once for every
// instruction set with MQ_ISA naming it; dispatch.cpp picks one.
#include <cfenv>

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

template <int count, class T>
INLINE uint32_t amax_of_few(const T *x) {
  Bits amax = magnitude(load_floats(x));
  for (int i = kLanes; i < count; i += kLanes) amax = larger(amax, magnitude(load_floats(x + i)));
  return largest(amax);
}

// Sixteen values to FP4 codes, and back.
template <bool may_be_nan, class T>
INLINE void e2m1_pack(uint8_t *to, const T *x, float factor) {
  Sixteen codes;
  for (int i = 0; i < 16; i += kLanes)
    codes.part[i / kLanes] = e2m1_codes<may_be_nan>(clamp(load_floats(x + i) * factor, 6.0f));
  store_nibbles(to, codes);
}

template <class T>
INLINE void e2m1_unpack(T *out, const uint8_t *from, float scale) {
  Sixteen codes = load_nibbles(from);
  for (int i = 0; i < 16; i += kLanes) store_floats(out + i, e2m1_values(codes.part[i / kLanes]) * scale);
}

template <bool may_be_nan, bool is_fp8, class T>
INLINE void mx_block(uint8_t *codes, const T *x, float factor) {
  if (is_fp8)
    for (int i = 0; i < 32; i += kLanes)
      narrow(codes + i, e4m3_codes<may_be_nan>(clamp(load_floats(x + i) * factor, 448.0f)));
  else
    for (int half = 0; half < 2; half++) e2m1_pack<may_be_nan>(codes + half * 8, x + half * 16, factor);
}

template <class T, bool is_fp8>
void mx_quantize(const T *x, uint8_t *codes, uint8_t *scales, int64_t blocks, MxRule rule) {
  for (int64_t b = 0; b < blocks; b++, x += 32) {
    uint32_t exponent = mx_exponent(amax_of_few<32>(x), is_fp8, rule);
    scales[b] = uint8_t(exponent);
    float factor = power_of_two(exponent == 255 ? 255 : 254 - exponent);
    uint8_t *to = codes + b * (is_fp8 ? 32 : 16);
    if (exponent == 255)
      mx_block<true, is_fp8>(to, x, factor);
    else
      mx_block<false, is_fp8>(to, x, factor);
  }
}

template <class T, bool is_fp8>
void mx_dequantize(const uint8_t *codes, const uint8_t *scales, T *out, int64_t blocks) {
  for (int64_t b = 0; b < blocks; b++) {
    float scale = power_of_two(scales[b]);
    if (is_fp8)
      for (int64_t c = b * 32; c < b * 32 + 32; c += kLanes) store_floats(out + c, e4m3_values(widen(codes + c)) * scale);
    else
      for (int half = 0; half < 2; half++) e2m1_unpack(out + b * 32 + half * 16, codes + b * 16 + half * 8, scale);
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
INLINE uint32_t amax_of(const T *x, int64_t rows, int64_t columns, int64_t stride) {
  Bits best = {}, other = {};  // two, so that one need not wait for the other
  for (int64_t r = 0; r < rows; r++) {
    int64_t c = 0;
    for (; c + 2 * kLanes <= columns; c += 2 * kLanes) {
      best = larger(best, magnitude(load_floats(x + r * stride + c)));
      other = larger(other, magnitude(load_floats(x + r * stride + c + kLanes)));
    }
    for (; c < columns; c += kLanes) best = larger(best, magnitude(load_floats(x + r * stride + c)));
  }
  return largest(larger(best, other));
}

template <class T>
void row_amax(const T *x, float *amax, int64_t rows, int64_t columns) {
  for (int64_t r = 0; r < rows; r++) amax[r] = cast<float>(amax_of(x + r * columns, 1, columns, columns));
}

template <bool may_be_nan, bool divides, class T>
void fp8_block(uint8_t *codes, const T *x, int64_t rows, int64_t columns, int64_t stride, float by) {
  Floats operand = splat(by);
  for (int64_t r = 0; r < rows; r++)
    for (int64_t c = 0; c < columns; c += kLanes) {
      Floats value = load_floats(x + r * stride + c);
      value = divides ? value / operand : value * operand;
      narrow(codes + r * stride + c, e4m3_codes<may_be_nan>(clamp(value, 448.0f)));
    }
}

template <class T>
void fp8_quantize(const T *x, uint8_t *codes, float *scales, int64_t rows, int64_t columns, int64_t block_rows,
                  int64_t block_columns, Fp8Rule rule, const float *amax) {
  for (int64_t top = 0; top < rows; top += block_rows) {
    int64_t height = top + block_rows < rows ? block_rows : rows - top;
    for (int64_t left = 0; left < columns; left += block_columns) {
      const T *block = x + top * columns + left;
      uint8_t *to = codes + top * columns + left;
      uint32_t size = amax ? cast<uint32_t>(*amax) : amax_of(block, height, block_columns, columns);
      Fp8Scale scale = fp8_scale(cast<float>(size), rule);
      *scales++ = scale.stored;
      if (size >= kInf && scale.divides)  // Inf / Inf and 0 * Inf are NaN
        fp8_block<true, true>(to, block, height, block_columns, columns, scale.operand);
      else if (size >= kInf)
        fp8_block<true, false>(to, block, height, block_columns, columns, scale.operand);
      else if (scale.divides)
        fp8_block<false, true>(to, block, height, block_columns, columns, scale.operand);
      else
        fp8_block<false, false>(to, block, height, block_columns, columns, scale.operand);
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
      for (int64_t c = start; c < start + block_columns; c += kLanes)
        store_floats(out + c, e4m3_values(widen(codes + c)) * scale);
    }
}

// ---- NVFP4 by Transformer Engine's rule: blocks of 16, handled sixteen at a time where a row has so many

template <class T>
INLINE void amax_of_blocks(uint32_t *amax, const T *x, int blocks) {
  for (int b = 0; b < blocks; b++) amax[b] = amax_of_few<16>(x + b * 16);
}

#if defined(__AVX512F__)
INLINE void amax_of_blocks(uint32_t *amax, const Bf16 *x, int blocks) {
  if (blocks == 16) {
    Bits all = largest_of_blocks(x);
    memcpy(amax, &all, sizeof all);
  } else {
    for (int b = 0; b < blocks; b++) amax[b] = amax_of_few<16>(x + b * 16);
  }
}
#endif

template <class T>
INLINE void nvfp4_blocks(const T *x, uint8_t *codes, uint8_t *scales, int blocks, float multiplier, float decode) {
  uint32_t amax[16] = {};
  float factor[16];
  uint8_t bytes[16];
  amax_of_blocks(amax, x, blocks);
  Bits worst = {};
  for (int b = 0; b < 16; b += kLanes) {
    Bits scale = e4m3_codes(clamp(load<Floats>(amax + b) * multiplier, 448.0f));
    Floats encode = 1.0f / (e4m3_values(scale) * decode);
    encode = encode > splat(kFloatMax) ? splat(kFloatMax) : encode;
    memcpy(factor + b, &encode, sizeof encode);
    worst = larger(worst, magnitude(encode));
    narrow(bytes + b, scale);
  }
  memcpy(scales, bytes, size_t(blocks));
  if (largest(worst) > kInf)
    for (int b = 0; b < blocks; b++) e2m1_pack<true>(codes + b * 8, x + b * 16, factor[b]);
  else
    for (int b = 0; b < blocks; b++) e2m1_pack<false>(codes + b * 8, x + b * 16, factor[b]);
}

template <class T>
void nvfp4_quantize(const T *x, uint8_t *codes, uint8_t *scales, int64_t rows, int64_t columns,
                    const float *multipliers, const float *decodes, int64_t stride) {
  int64_t blocks = columns / 16;
  for (int64_t r = 0; r < rows; r++) {
    float multiplier = multipliers[r * stride], decode = decodes[r * stride];
    for (int64_t b = 0; b < blocks; b += 16) {
      int64_t at = r * blocks + b;
      if (blocks - b >= 16)  // spelled out, so that the loops inside have a fixed length
        nvfp4_blocks(x + at * 16, codes + at * 8, scales + at, 16, multiplier, decode);
      else
        nvfp4_blocks(x + at * 16, codes + at * 8, scales + at, int(blocks - b), multiplier, decode);
    }
  }
}

// One of the two candidates of 4-over-6: its codes, and its error summed in order, which rounds at every step.
template <class T>
INLINE float nvfp4_candidate(Sixteen *codes, const T *x, float scale, float decode, float amax, bool is_squared) {
  float factor = 1.0f / (scale * decode), distances[16], total = 0.0f;
  factor = factor > kFloatMax ? kFloatMax : factor;
  for (int i = 0; i < 16; i += kLanes) {
    Floats value = load_floats(x + i);
    Bits code = codes->part[i / kLanes] = e2m1_codes<true>(clamp(value * factor, 6.0f));
    Floats distance = e2m1_values(code) * scale * amax / splat(6.0f * 256.0f) - value;
    store_floats(distances + i, is_squared ? distance * distance : cast<Floats>(magnitude(distance)));
  }
  for (int i = 0; i < 16; i++) total += distances[i];
  return total;
}

template <class T>
void nvfp4_4o6_quantize(const T *x, uint8_t *codes, uint8_t *scales, int64_t rows, int64_t columns,
                        const float *encodes, const float *decodes, const float *amaxes, int64_t stride,
                        bool is_squared) {
  int64_t blocks = columns / 16;
  for (int64_t r = 0; r < rows; r++)
    for (int64_t at = r * blocks; at < (r + 1) * blocks; at++) {
      float base = cast<float>(amax_of_few<16>(x + at * 16)) / 6.0f * encodes[r * stride];
      Bits both = e4m3_codes(clamp(Floats{base, base * 1.5f}, 448.0f));
      Floats values = e4m3_values(both);
      Sixteen six, four;
      float decode = decodes[r * stride], amax = amaxes[r * stride];
      float error_six = nvfp4_candidate(&six, x + at * 16, values[0], decode, amax, is_squared);
      float error_four = nvfp4_candidate(&four, x + at * 16, values[1], decode, amax, is_squared);
      bool picks_four = error_four < error_six;
      scales[at] = uint8_t(picks_four ? both[1] : both[0]);
      store_nibbles(codes + at * 8, picks_four ? four : six);
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
      e2m1_unpack(out + at * 16, codes + at * 8, scale * decodes[r * stride]);
    }
}

// ---- INT4: groups whose columns are whole vectors

template <class T>
INLINE void int4_groups(const T *x, uint8_t *codes, uint16_t *scales, int64_t groups, int64_t size) {
  for (int64_t g = 0; g < groups; g++, x += size) {
    float scale = cast<float>(size == 32 ? amax_of_few<32>(x) : amax_of(x, 1, size, size)) * (1.0f / 7.0f);
    scale = scale < 1e-5f ? 1e-5f : scale;
    scales[g] = to_bf16(scale);
    for (int64_t c = 0; c < size; c += 16) {
      Sixteen sixteen;  // within +-7 by the choice of the scale; NaN has code 8, as INT_MIN and 0 both give
      for (int i = 0; i < 16; i += kLanes) {
        Bits code = cast<Bits>(nearest(load_floats(x + c + i) / splat(scale))) + 8u;
        sixteen.part[i / kLanes] = kLanes == 16 ? code : code & 15u;  // sixteen lanes narrow by truncation anyway
      }
      store_nibbles(codes + (g * size + c) / 2, sixteen);
    }
  }
}

template <class T>
void int4_quantize(const T *x, uint8_t *codes, uint16_t *scales, int64_t groups, int64_t size) {
  if (size == 32)  // spelled out, so that the loops inside have a fixed length
    int4_groups(x, codes, scales, groups, 32);
  else
    int4_groups(x, codes, scales, groups, size);
}

template <class T>
void int4_dequantize(const uint8_t *codes, const uint16_t *scales, T *out, int64_t groups, int64_t size) {
  for (int64_t g = 0; g < groups; g++) {
    float scale = cast<float>(uint32_t(scales[g]) << 16);
    for (int64_t c = g * size; c < (g + 1) * size; c += 16) {
      Sixteen code = load_nibbles(codes + c / 2);
      for (int i = 0; i < 16; i += kLanes)
        store_floats(out + c + i, __builtin_convertvector(cast<Ints>(code.part[i / kLanes]) - 8, Floats) * scale);
    }
  }
}

// While it lives, denormals count and rounding is to nearest even, whatever the thread was set to: values of codes go
// through denormals, and torch.set_flush_denormal(True) would make zeros of them.
struct DefaultArithmetic {
  fenv_t before;
  DefaultArithmetic() {
    fegetenv(&before);
    fesetenv(FE_DFL_ENV);
  }
  ~DefaultArithmetic() { fesetenv(&before); }
};

}  // namespace

#define BY_TYPE(call)                     \
  do {                                    \
    DefaultArithmetic here;               \
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
    [](const void *x, int is_bf16, uint8_t *codes, uint8_t *scales, int64_t rows, int64_t columns,
       const float *encodes, const float *decodes, const float *amaxes, int64_t stride, int is_squared) {
      BY_TYPE((nvfp4_4o6_quantize((const T *)x, codes, scales, rows, columns, encodes, decodes, amaxes, stride,
                                  is_squared != 0)));
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
