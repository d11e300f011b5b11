// Sixty-four elements at a time to a mask of 64 bits: which changed, and which are of a class. All that differs between
// instruction sets.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "kernels.h"

#define INLINE static inline __attribute__((always_inline))

namespace {

template <class T> constexpr int kExponentShift = sizeof(T) == 1 ? 3 : sizeof(T) == 2 ? 7 : 23;
template <class T> constexpr T kMagnitude = T(T(~T(0)) >> 1);

// Classes by magnitude: class k from floors[k] on.
template <class T> struct Classes {
  int count;
  T floors[kMaxClasses];
  uint8_t of_exponent[256];

  Classes(const uint32_t *from, int num) : count(num) {
    for (int k = 0; k < num; k++) floors[k] = T(from[k]);
    for (int e = 0; e < 256; e++) {
      of_exponent[e] = 0;
      for (int k = 1; k < num; k++) of_exponent[e] += (uint64_t(e) << kExponentShift<T>) >= from[k];
    }
  }
};

#if defined(__AVX512BW__)

INLINE __m512i load512(const void *from) { return _mm512_loadu_si512(from); }

INLINE uint64_t changed64(const uint8_t *a, const uint8_t *b) {
  return _mm512_cmpneq_epi8_mask(load512(a), load512(b));
}
INLINE uint64_t changed64(const uint16_t *a, const uint16_t *b) {
  uint64_t low = _mm512_cmpneq_epi16_mask(load512(a), load512(b));
  uint64_t high = _mm512_cmpneq_epi16_mask(load512(a + 32), load512(b + 32));
  return low | high << 32;
}
INLINE uint64_t changed64(const uint32_t *a, const uint32_t *b) {
  uint64_t mask = 0;
  for (int i = 0; i < 4; i++)
    mask |= uint64_t(_mm512_cmpneq_epi32_mask(load512(a + 16 * i), load512(b + 16 * i))) << 16 * i;
  return mask;
}

struct Magnitudes8 {
  __m512i v;
  explicit Magnitudes8(const uint8_t *x) : v(_mm512_and_si512(load512(x), _mm512_set1_epi8(0x7F))) {}
  INLINE uint64_t from(Magnitudes8 m, uint8_t floor) { return _mm512_cmpge_epu8_mask(m.v, _mm512_set1_epi8(char(floor))); }
};
struct Magnitudes16 {
  __m512i v[2];
  explicit Magnitudes16(const uint16_t *x) {
    for (int i = 0; i < 2; i++) v[i] = _mm512_and_si512(load512(x + 32 * i), _mm512_set1_epi16(0x7FFF));
  }
  INLINE uint64_t from(const Magnitudes16 &m, uint16_t floor) {
    __m512i f = _mm512_set1_epi16(short(floor));
    return uint64_t(_mm512_cmpge_epu16_mask(m.v[0], f)) | uint64_t(_mm512_cmpge_epu16_mask(m.v[1], f)) << 32;
  }
};
struct Magnitudes32 {
  __m512i v[4];
  explicit Magnitudes32(const uint32_t *x) {
    for (int i = 0; i < 4; i++) v[i] = _mm512_and_si512(load512(x + 16 * i), _mm512_set1_epi32(0x7FFFFFFF));
  }
  INLINE uint64_t from(const Magnitudes32 &m, uint32_t floor) {
    __m512i f = _mm512_set1_epi32(int(floor));
    uint64_t mask = 0;
    for (int i = 0; i < 4; i++) mask |= uint64_t(_mm512_cmpge_epu32_mask(m.v[i], f)) << 16 * i;
    return mask;
  }
};

#elif defined(__AVX2__)

INLINE __m256i load256(const void *from) { return _mm256_loadu_si256(static_cast<const __m256i *>(from)); }
INLINE uint64_t bits8(__m256i lanes) { return uint32_t(_mm256_movemask_epi8(lanes)); }
INLINE uint64_t bits16(__m256i low, __m256i high) {  // packing works within halves: put the quarters in order
  return bits8(_mm256_permute4x64_epi64(_mm256_packs_epi16(low, high), 0xD8));
}
INLINE uint64_t bits32(__m256i lanes) { return uint32_t(_mm256_movemask_ps(_mm256_castsi256_ps(lanes))); }

INLINE uint64_t changed64(const uint8_t *a, const uint8_t *b) {
  uint64_t low = bits8(_mm256_cmpeq_epi8(load256(a), load256(b)));
  return ~(low | bits8(_mm256_cmpeq_epi8(load256(a + 32), load256(b + 32))) << 32);
}
INLINE uint64_t changed64(const uint16_t *a, const uint16_t *b) {
  __m256i same[4];
  for (int i = 0; i < 4; i++) same[i] = _mm256_cmpeq_epi16(load256(a + 16 * i), load256(b + 16 * i));
  return ~(bits16(same[0], same[1]) | bits16(same[2], same[3]) << 32);
}
INLINE uint64_t changed64(const uint32_t *a, const uint32_t *b) {
  uint64_t same = 0;
  for (int i = 0; i < 8; i++) same |= bits32(_mm256_cmpeq_epi32(load256(a + 8 * i), load256(b + 8 * i))) << 8 * i;
  return ~same;
}

// Magnitudes have no sign bit, so comparisons may be signed; floors are at least 1.
struct Magnitudes8 {
  __m256i v[2];
  explicit Magnitudes8(const uint8_t *x) {
    for (int i = 0; i < 2; i++) v[i] = _mm256_and_si256(load256(x + 32 * i), _mm256_set1_epi8(0x7F));
  }
  INLINE uint64_t from(const Magnitudes8 &m, uint8_t floor) {
    __m256i f = _mm256_set1_epi8(char(floor - 1));
    return bits8(_mm256_cmpgt_epi8(m.v[0], f)) | bits8(_mm256_cmpgt_epi8(m.v[1], f)) << 32;
  }
};
struct Magnitudes16 {
  __m256i v[4];
  explicit Magnitudes16(const uint16_t *x) {
    for (int i = 0; i < 4; i++) v[i] = _mm256_and_si256(load256(x + 16 * i), _mm256_set1_epi16(0x7FFF));
  }
  INLINE uint64_t from(const Magnitudes16 &m, uint16_t floor) {
    __m256i f = _mm256_set1_epi16(short(floor - 1)), is[4];
    for (int i = 0; i < 4; i++) is[i] = _mm256_cmpgt_epi16(m.v[i], f);
    return bits16(is[0], is[1]) | bits16(is[2], is[3]) << 32;
  }
};
struct Magnitudes32 {
  __m256i v[8];
  explicit Magnitudes32(const uint32_t *x) {
    for (int i = 0; i < 8; i++) v[i] = _mm256_and_si256(load256(x + 8 * i), _mm256_set1_epi32(0x7FFFFFFF));
  }
  INLINE uint64_t from(const Magnitudes32 &m, uint32_t floor) {
    __m256i f = _mm256_set1_epi32(int(floor - 1));
    uint64_t mask = 0;
    for (int i = 0; i < 8; i++) mask |= bits32(_mm256_cmpgt_epi32(m.v[i], f)) << 8 * i;
    return mask;
  }
};

#else

// A word of 8 bytes at a time: most words are equal.
template <class T> INLINE uint64_t changed64(const T *a, const T *b) {
  constexpr int kLanes = 8 / sizeof(T);
  uint64_t mask = 0;
  for (int i = 0; i < 64; i += kLanes) {
    uint64_t x, y;
    memcpy(&x, a + i, 8);
    memcpy(&y, b + i, 8);
    if (x == y) continue;
    for (int lane = 0; lane < kLanes; lane++) mask |= uint64_t(a[i + lane] != b[i + lane]) << (i + lane);
  }
  return mask;
}

#endif

#if defined(__AVX2__)
template <class T> struct MagnitudesOf;
template <> struct MagnitudesOf<uint8_t> { using type = Magnitudes8; };
template <> struct MagnitudesOf<uint16_t> { using type = Magnitudes16; };
template <> struct MagnitudesOf<uint32_t> { using type = Magnitudes32; };

template <class T> INLINE void classes64(const T *old, const Classes<T> &classes, uint64_t *masks) {
  using Magnitudes = typename MagnitudesOf<T>::type;
  Magnitudes magnitudes(old);
  uint64_t from = ~uint64_t(0);
  for (int k = 0; k + 1 < classes.count; k++) {
    uint64_t next = Magnitudes::from(magnitudes, classes.floors[k + 1]);
    masks[k] = from & ~next;
    from = next;
  }
  masks[classes.count - 1] = from;
}
#else
template <class T> INLINE void classes64(const T *old, const Classes<T> &classes, uint64_t *masks) {
  for (int k = 0; k < classes.count; k++) masks[k] = 0;
  for (int i = 0; i < 64; i++)
    masks[classes.of_exponent[(old[i] & kMagnitude<T>) >> kExponentShift<T>]] |= uint64_t(1) << i;
}
#endif

// The set bit that has `rank` set bits below it.
INLINE int select64(uint64_t mask, uint64_t rank) {
#if defined(__BMI2__)
  return __builtin_ctzll(_pdep_u64(uint64_t(1) << rank, mask));
#else
  for (; rank; rank--) mask &= mask - 1;
  return __builtin_ctzll(mask);
#endif
}

}  // namespace
