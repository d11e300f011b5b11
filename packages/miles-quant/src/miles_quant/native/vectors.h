// Sixteen lanes of float32 and what the formats do to them, on compiler vectors: the same source for every instruction
// set, and therefore the same bits. Intrinsics stand only where a compiler does not find the instruction by itself.
#pragma once
#include <cstdint>
#include <cstring>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))

namespace {

typedef float f32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef uint8_t u8x16 __attribute__((vector_size(16)));
typedef uint16_t u16x8 __attribute__((vector_size(16)));
typedef uint8_t u8x8 __attribute__((vector_size(8)));

constexpr uint32_t kNan = 0x7FC00000u, kInf = 0x7F800000u;
constexpr float kFloatMax = 3.4028234663852886e38f;

template <class To, class From> INLINE To cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "a cast keeps the bits");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

template <class T> INLINE T load(const void *from) {
  T to;
  memcpy(&to, from, sizeof to);
  return to;
}

INLINE f32x16 splat(float value) { return value - f32x16{}; }
INLINE u32x16 splat_bits(uint32_t value) { return value - u32x16{}; }

struct Bf16 { uint16_t bits; };

INLINE f32x16 load16(const float *from) { return load<f32x16>(from); }
INLINE f32x16 load16(const Bf16 *from) {
  return cast<f32x16>(__builtin_convertvector(load<u16x16>(from), u32x16) << 16);
}

INLINE void store16(float *to, f32x16 value) { memcpy(to, &value, sizeof value); }
INLINE void store16(Bf16 *to, f32x16 value) {
  u32x16 bits = cast<u32x16>(value);
  u32x16 rounded = (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16;
  rounded = (bits & 0x7FFFFFFFu) > kInf ? splat_bits(kNan >> 16) : rounded;
  u16x16 narrow = __builtin_convertvector(rounded, u16x16);
  memcpy(to, &narrow, sizeof narrow);
}

INLINE uint16_t to_bf16(float value) {
  Bf16 lanes[16];
  store16(lanes, splat(value));
  return lanes[0].bits;
}

INLINE u32x16 magnitude(f32x16 value) { return cast<u32x16>(value) & 0x7FFFFFFFu; }
INLINE u32x16 larger(u32x16 a, u32x16 b) { return a > b ? a : b; }

// As bits, magnitudes order as numbers do, and NaN above all of them.
INLINE uint32_t largest(u32x16 values) {
#ifdef __AVX512F__
  return _mm512_reduce_max_epu32(cast<__m512i>(values));
#else
  uint32_t best = 0;
  for (int i = 0; i < 16; i++) best = values[i] > best ? values[i] : best;
  return best;
#endif
}

INLINE bool is_nan(float value) { return (cast<uint32_t>(value) & 0x7FFFFFFFu) > kInf; }

// Comparisons with NaN are false, so it passes through.
INLINE f32x16 clamp(f32x16 value, float limit) {
#ifdef __AVX512F__
  // min and max return their second operand where one is NaN
  __m512 low = _mm512_min_ps(_mm512_set1_ps(limit), cast<__m512>(value));
  return cast<f32x16>(_mm512_max_ps(_mm512_set1_ps(-limit), low));
#else
  value = value > splat(limit) ? splat(limit) : value;
  return value < splat(-limit) ? splat(-limit) : value;
#endif
}

// Codes of E4M3 for values within +-448: round the bits to three of mantissa; below 2^-6 let an addition do it.
INLINE u32x16 e4m3_codes(f32x16 value) {
  u32x16 bits = cast<u32x16>(value), size = bits & 0x7FFFFFFFu;
  u32x16 normal = ((size + 0x7FFFFu + (size >> 20 & 1u)) >> 20) - 960u;
  u32x16 small = cast<u32x16>(cast<f32x16>(size) + 16384.0f) - 0x46800000u;
  u32x16 code = (size < 0x3C800000u ? small : normal) | (bits >> 24 & 0x80u);
  return size > kInf ? splat_bits(0x7Fu) : code;
}

INLINE f32x16 e4m3_values(u32x16 code) {
  u32x16 size = code & 0x7Fu;
  u32x16 value = cast<u32x16>(cast<f32x16>(size << 20) * 0x1p120f) | (code & 0x80u) << 24;
  return cast<f32x16>(size == 0x7Fu ? splat_bits(kNan) : value);
}

// Codes of E2M1 for values within +-6; NaN is 0.
INLINE u32x16 e2m1_codes(f32x16 value) {
  u32x16 bits = cast<u32x16>(value), size = bits & 0x7FFFFFFFu;
  u32x16 normal = ((size + 0x1FFFFFu + (size >> 22 & 1u)) >> 22) - 252u;
  u32x16 small = cast<u32x16>(cast<f32x16>(size) + 4194304.0f) - 0x4A800000u;
  u32x16 code = (size < 0x3F800000u ? small : normal) | (bits >> 28 & 8u);
  return size > kInf ? splat_bits(0u) : code;
}

INLINE f32x16 e2m1_values(u32x16 code) {
  u32x16 value = cast<u32x16>(cast<f32x16>((code & 7u) << 22) * 0x1p126f);
  return cast<f32x16>(value | (code & 8u) << 28);
}

INLINE void store_bytes(uint8_t *to, u32x16 codes) {
#ifdef __AVX512F__
  _mm_storeu_si128((__m128i *)to, _mm512_cvtepi32_epi8(cast<__m512i>(codes)));
#else
  u8x16 narrow = __builtin_convertvector(codes, u8x16);
  memcpy(to, &narrow, sizeof narrow);
#endif
}

INLINE u32x16 load_bytes(const uint8_t *from) { return __builtin_convertvector(load<u8x16>(from), u32x16); }

// Sixteen codes below 16 to eight bytes, the even one in the low nibble.
INLINE void store_nibbles(uint8_t *to, u32x16 codes) {
#ifdef __AVX512F__
  __m128i bytes = _mm512_cvtepi32_epi8(cast<__m512i>(codes));
  _mm_storel_epi64((__m128i *)to, _mm_cvtepi16_epi8(_mm_maddubs_epi16(bytes, _mm_set1_epi16(0x1001))));
#else
  u16x8 pairs = cast<u16x8>(__builtin_convertvector(codes, u8x16));
  u8x8 packed = __builtin_convertvector((u16x8)(pairs | pairs >> 4), u8x8);
  memcpy(to, &packed, sizeof packed);
#endif
}

INLINE u32x16 load_nibbles(const uint8_t *from) {
  u16x8 bytes = __builtin_convertvector(load<u8x8>(from), u16x8);
  return __builtin_convertvector(cast<u8x16>((u16x8)((bytes & 15) | (bytes & 0xF0) << 4)), u32x16);
}

}  // namespace
