// A vector of float32 lanes and what the formats do to it, on the compiler's vector types: one source for every
// instruction set, and therefore the same bits. Intrinsics stand only where compilers go lane by lane.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Bits __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));

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

INLINE Floats splat(float value) { return value - Floats{}; }
INLINE Bits splat_bits(uint32_t value) { return value - Bits{}; }

// ---- widening, narrowing, the largest lane

#if defined(__AVX512F__)
INLINE Bits widen(const uint8_t *from) { return cast<Bits>(_mm512_cvtepu8_epi32(load<__m128i>(from))); }
INLINE Bits widen(const uint16_t *from) { return cast<Bits>(_mm512_cvtepu16_epi32(load<__m256i>(from))); }
INLINE void narrow(uint8_t *to, Bits values) {
  __m128i bytes = _mm512_cvtepi32_epi8(cast<__m512i>(values));
  memcpy(to, &bytes, sizeof bytes);
}
INLINE void narrow(uint16_t *to, Bits values) {
  __m256i words = _mm512_cvtepi32_epi16(cast<__m512i>(values));
  memcpy(to, &words, sizeof words);
}
INLINE uint32_t largest(Bits values) { return _mm512_reduce_max_epu32(cast<__m512i>(values)); }
#elif defined(__AVX2__)
INLINE Bits widen(const uint8_t *from) {
  return cast<Bits>(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(load<int64_t>(from))));
}
INLINE Bits widen(const uint16_t *from) { return cast<Bits>(_mm256_cvtepu16_epi32(load<__m128i>(from))); }
INLINE __m128i words_of(Bits values) {  // all below 2^16
  __m256i wide = cast<__m256i>(values);
  return _mm_packus_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
}
INLINE void narrow(uint8_t *to, Bits values) {
  __m128i words = words_of(values);
  int64_t bytes = _mm_cvtsi128_si64(_mm_packus_epi16(words, words));
  memcpy(to, &bytes, sizeof bytes);
}
INLINE void narrow(uint16_t *to, Bits values) {
  __m128i words = words_of(values);
  memcpy(to, &words, sizeof words);
}
INLINE uint32_t largest(Bits values) {
  __m256i eight = cast<__m256i>(values);
  __m128i four = _mm_max_epu32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  four = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0x4E));
  return uint32_t(_mm_cvtsi128_si32(_mm_max_epu32(four, _mm_shuffle_epi32(four, 0xB1))));
}
#else
template <class T> INLINE Bits widen(const T *from) {
  Bits values;
  for (int i = 0; i < kLanes; i++) values[i] = from[i];
  return values;
}
template <class T> INLINE void narrow(T *to, Bits values) {
  for (int i = 0; i < kLanes; i++) to[i] = T(values[i]);
}
INLINE uint32_t largest(Bits values) {
  uint32_t best = 0;
  for (int i = 0; i < kLanes; i++) best = values[i] > best ? values[i] : best;
  return best;
}
#endif

// ---- loading and storing the two types that matrices have

struct Bf16 { uint16_t bits; };

INLINE Floats load_floats(const float *from) { return load<Floats>(from); }
INLINE Floats load_floats(const Bf16 *from) { return cast<Floats>(widen(&from->bits) << 16); }

#if defined(__AVX512F__)
// The largest magnitude of each of sixteen blocks of sixteen values that follow one another, as bits of float32: a
// register holds two blocks, and every step folds two registers into one.
INLINE Bits largest_of_blocks(const Bf16 *from) {
  __m512i pairs[8];
  for (int i = 0; i < 8; i++)
    pairs[i] = _mm512_and_si512(_mm512_loadu_si512(from + i * 32), _mm512_set1_epi16(0x7FFF));
  for (int i = 0; i < 4; i++) {
    __m512i low = _mm512_unpacklo_epi64(pairs[i * 2], pairs[i * 2 + 1]);
    pairs[i] = _mm512_max_epu16(low, _mm512_unpackhi_epi64(pairs[i * 2], pairs[i * 2 + 1]));
  }
  for (int i = 0; i < 2; i++) {
    __m512 a = _mm512_castsi512_ps(pairs[i * 2]), b = _mm512_castsi512_ps(pairs[i * 2 + 1]);
    __m512i words = _mm512_max_epu16(_mm512_castps_si512(_mm512_shuffle_ps(a, b, 0x88)),
                                     _mm512_castps_si512(_mm512_shuffle_ps(a, b, 0xDD)));
    words = _mm512_max_epu16(words, _mm512_shuffle_i32x4(words, words, 0xB1));
    pairs[i] = _mm512_max_epu16(words, _mm512_slli_epi32(words, 16));
  }
  const __m512i order = _mm512_setr_epi32(0, 8, 1, 9, 2, 10, 3, 11, 16, 24, 17, 25, 18, 26, 19, 27);
  return cast<Bits>(_mm512_permutex2var_epi32(pairs[0], order, pairs[1])) & 0xFFFF0000u;
}
#endif

INLINE void store_floats(float *to, Floats value) { memcpy(to, &value, sizeof value); }
INLINE void store_floats(Bf16 *to, Floats value) {
  Bits bits = cast<Bits>(value);
  Bits rounded = (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16;
  narrow(&to->bits, (bits & 0x7FFFFFFFu) > kInf ? splat_bits(kNan >> 16) : rounded);
}

INLINE uint16_t to_bf16(float value) {
  uint32_t bits = cast<uint32_t>(value);
  return uint16_t((bits & 0x7FFFFFFFu) > kInf ? kNan >> 16 : (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
}

// ---- numbers; comparisons of magnitudes as bits order as numbers do, and NaN above all of them

INLINE Bits magnitude(Floats value) { return cast<Bits>(value) & 0x7FFFFFFFu; }
INLINE Bits larger(Bits a, Bits b) { return cast<Ints>(a) > cast<Ints>(b) ? a : b; }
INLINE bool is_nan(float value) { return (cast<uint32_t>(value) & 0x7FFFFFFFu) > kInf; }

// Comparisons with NaN are false, so it passes through.
INLINE Floats clamp(Floats value, float limit) {
#if defined(__AVX512F__)
  // min and max return their second operand where one is NaN
  __m512 low = _mm512_min_ps(_mm512_set1_ps(limit), cast<__m512>(value));
  return cast<Floats>(_mm512_max_ps(_mm512_set1_ps(-limit), low));
#else
  value = value > splat(limit) ? splat(limit) : value;
  return value < splat(-limit) ? splat(-limit) : value;
#endif
}

// To the nearest integer, ties to even; NaN to INT_MIN (portable: to 0 on some machines).
INLINE Ints nearest(Floats value) {
#if defined(__AVX512F__)
  return cast<Ints>(_mm512_cvtps_epi32(cast<__m512>(value)));
#elif defined(__AVX2__)
  return cast<Ints>(_mm256_cvtps_epi32(cast<__m256>(value)));
#else
  return __builtin_convertvector((value + 12582912.0f) - 12582912.0f, Ints);  // 1.5 * 2^23 leaves no fraction
#endif
}

// Codes of E4M3 for values within +-448: round the bits to three of mantissa; below 2^-6 let an addition do it.
// Whoever knows that there is no NaN saves the check.
template <bool may_be_nan = true> INLINE Bits e4m3_codes(Floats value) {
  Bits bits = cast<Bits>(value), size = bits & 0x7FFFFFFFu;
  Bits normal = ((size + 0x7FFFFu + (size >> 20 & 1u)) >> 20) - 960u;
  Bits small = cast<Bits>(cast<Floats>(size) + 16384.0f) - 0x46800000u;
  Bits code = (cast<Ints>(size) < 0x3C800000 ? small : normal) | (bits >> 24 & 0x80u);
  return may_be_nan ? cast<Ints>(size) > int32_t(kInf) ? splat_bits(0x7Fu) : code : code;
}

INLINE Floats e4m3_values(Bits code) {
  Bits size = code & 0x7Fu;
  Bits value = cast<Bits>(cast<Floats>(size << 20) * 0x1p120f) | (code & 0x80u) << 24;
  return cast<Floats>(size == 0x7Fu ? splat_bits(kNan) : value);
}

// Codes of E2M1 for values within +-6; NaN is 0.
template <bool may_be_nan> INLINE Bits e2m1_codes(Floats value) {
  Bits bits = cast<Bits>(value), size = bits & 0x7FFFFFFFu;
  Bits normal = ((size + 0x1FFFFFu + (size >> 22 & 1u)) >> 22) - 252u;
  Bits small = cast<Bits>(cast<Floats>(size) + 4194304.0f) - 0x4A800000u;
  Bits code = (cast<Ints>(size) < 0x3F800000 ? small : normal) | (bits >> 28 & 8u);
  return may_be_nan ? cast<Ints>(size) > int32_t(kInf) ? splat_bits(0u) : code : code;
}

INLINE Floats e2m1_values(Bits code) {
#if defined(__AVX512F__)
  const __m512 table = _mm512_setr_ps(0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.f, -.5f, -1, -1.5f, -2, -3, -4, -6);
  return cast<Floats>(_mm512_permutexvar_ps(cast<__m512i>(code), table));
#elif defined(__AVX2__)
  const __m256 table = _mm256_setr_ps(0, .5f, 1, 1.5f, 2, 3, 4, 6);  // it reads three bits of an index
  Bits value = cast<Bits>(_mm256_permutevar8x32_ps(table, cast<__m256i>(code)));
  return cast<Floats>(value | (code & 8u) << 28);
#else
  Bits value = cast<Bits>(cast<Floats>((code & 7u) << 22) * 0x1p126f);
  return cast<Floats>(value | (code & 8u) << 28);
#endif
}

// ---- sixteen codes below 16 in eight bytes, the even one in the low nibble

struct Sixteen {
  Bits part[16 / kLanes];
};

#if defined(__AVX2__)
INLINE void store_nibbles(uint8_t *to, const Sixteen &codes) {
#if defined(__AVX512F__)
  __m128i bytes = _mm512_cvtepi32_epi8(cast<__m512i>(codes.part[0]));
#else
  __m128i bytes = _mm_packus_epi16(words_of(codes.part[0]), words_of(codes.part[1]));
#endif
  __m128i pairs = _mm_maddubs_epi16(bytes, _mm_set1_epi16(0x1001));
  _mm_storel_epi64((__m128i *)to, _mm_packus_epi16(pairs, pairs));
}

INLINE Sixteen load_nibbles(const uint8_t *from) {
  __m128i words = _mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i *)from));
  __m128i codes = _mm_and_si128(_mm_or_si128(words, _mm_slli_epi16(words, 4)), _mm_set1_epi8(15));
#if defined(__AVX512F__)
  return {{cast<Bits>(_mm512_cvtepu8_epi32(codes))}};
#else
  return {{cast<Bits>(_mm256_cvtepu8_epi32(codes)), cast<Bits>(_mm256_cvtepu8_epi32(_mm_srli_si128(codes, 8)))}};
#endif
}
#else
INLINE void store_nibbles(uint8_t *to, const Sixteen &codes) {
  for (int i = 0; i < 16; i += 2)
    to[i / 2] = uint8_t(codes.part[i / kLanes][i % kLanes] | codes.part[i / kLanes][i % kLanes + 1] << 4);
}

INLINE Sixteen load_nibbles(const uint8_t *from) {
  Sixteen codes;
  for (int i = 0; i < 16; i++) codes.part[i / kLanes][i % kLanes] = from[i / 2] >> i % 2 * 4 & 15;
  return codes;
}
#endif

}  // namespace
