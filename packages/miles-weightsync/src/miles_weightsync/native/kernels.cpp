// The codecs of ../delta on bit patterns: the formats stand there. Compiled once for every instruction set, with MW_ISA
// naming it; dispatch.cpp picks one.
#include "kernels.h"

#include "masks.h"

namespace {

constexpr uint8_t kChain = 254, kLong = 255, kByte = 15, kEscape = 255;
constexpr uint64_t kMaxChain = 8;

template <class T> INLINE T load(const void *from) {
  T to;
  memcpy(&to, from, sizeof to);
  return to;
}

INLINE uint64_t witness_of(uint64_t position, uint64_t value) {
  uint64_t x = (position + 1) * 0x9E3779B97F4A7C15u ^ value;
  x = (x ^ x >> 32) * 0xD6E8FEB86659FD93u;
  return x ^ x >> 32;
}

// ---- writing

template <class T> INLINE void write(Writer &w, uint64_t position, T step) {
  uint64_t gap = position - w.next;
  w.next = position + 1;
  if (w.is_wide) {
    w.lows[w.num_lows++] = uint8_t(gap);
    gap >>= 8;
  }
  if (__builtin_expect(gap < kChain, 1)) {
    w.gaps[w.num_gaps++] = uint8_t(gap);
  } else if (gap / kChain <= kMaxChain) {
    for (; gap >= kChain; gap -= kChain) w.gaps[w.num_gaps++] = kChain;
    w.gaps[w.num_gaps++] = uint8_t(gap);
  } else {
    w.gaps[w.num_gaps++] = kLong;
    memcpy(w.longs + w.num_longs, &gap, 8);
    w.num_longs += 8;
  }
  T zigzag = T(step << 1) ^ T(-T(step >> (8 * sizeof(T) - 1)));
  uint64_t half = zigzag < kByte ? zigzag : kByte;
  if (w.changes++ & 1)
    w.steps[w.num_steps++] = uint8_t(uint64_t(w.pending) | half << 4);
  else
    w.pending = int64_t(half);
  if (__builtin_expect(half < kByte, 1)) return;
  bool fits = sizeof(T) == 1 || zigzag < kEscape;
  w.bytes[w.num_bytes++] = fits ? uint8_t(zigzag) : kEscape;
  if (fits) return;
  memcpy(w.escapes + w.num_escapes, &step, sizeof step);
  w.num_escapes += sizeof step;
}

// `block` has 64 elements of which the first `valid` are real; the rest are equal in both.
template <class T, bool has_classes>
INLINE int64_t find_block(const T *old, const T *now, uint64_t valid, uint64_t start, const Classes<T> &classes,
                          Writer *writers, uint64_t &witness) {
  uint64_t changed = changed64(old, now), masks[kMaxClasses];
  if (has_classes) classes64(old, classes, masks);
  int64_t count = __builtin_popcountll(changed);
  for (; changed; changed &= changed - 1) {
    int i = __builtin_ctzll(changed);
    witness += witness_of(start + uint64_t(i), old[i]);
    int k = has_classes ? classes.of_exponent[(old[i] & kMagnitude<T>) >> kExponentShift<T>] : 0;
    uint64_t below = (uint64_t(1) << i) - 1;
    uint64_t rank = has_classes ? uint64_t(__builtin_popcountll(masks[k] & below)) : uint64_t(i);
    write(writers[k], writers[k].elements + rank, T(now[i] - old[i]));
  }
  if (has_classes)
    for (int k = 0; k < classes.count; k++) writers[k].elements += uint64_t(__builtin_popcountll(masks[k] & valid));
  else
    writers[0].elements += uint64_t(__builtin_popcountll(valid));
  return count;
}

template <class T, bool has_classes>
int64_t find(const T *old, const T *now, int64_t n, uint64_t start, const Classes<T> &classes, Writer *writers,
             uint64_t *witness) {
  int64_t count = 0, i = 0;
  uint64_t seen = 0;
  for (; i + 64 <= n; i += 64)
    count += find_block<T, has_classes>(old + i, now + i, ~uint64_t(0), start + i, classes, writers, seen);
  if (i < n) {
    T before[64] = {}, after[64] = {};
    memcpy(before, old + i, (n - i) * sizeof(T));
    memcpy(after, now + i, (n - i) * sizeof(T));
    uint64_t valid = (uint64_t(1) << (n - i)) - 1;
    count += find_block<T, has_classes>(before, after, valid, start + i, classes, writers, seen);
  }
  *witness += seen;
  return count;
}

template <class T>
int64_t find_of(const void *old, const void *now, int64_t n, uint64_t start, const uint32_t *floors, int num_classes,
                Writer *writers, uint64_t *witness) {
  Classes<T> classes(floors, num_classes);
  auto run = num_classes > 1 ? find<T, true> : find<T, false>;
  return run(static_cast<const T *>(old), static_cast<const T *>(now), n, start, classes, writers, witness);
}

template <class T> void pack_of(const uint64_t *positions, const void *steps, int64_t n, Writer *writer) {
  for (int64_t i = 0; i < n; i++) write(*writer, positions[i], static_cast<const T *>(steps)[i]);
}

// ---- reading

// Calls `sink(position, step)` for every change of the track, in order, and never with a position at or past its limit.
template <class T, class Sink> INLINE Fault walk(const Reader &r, Sink &sink) {
  const uint8_t *gaps = r.gaps, *gaps_end = gaps + r.num_gaps, *longs = r.longs, *longs_end = longs + r.num_longs;
  const uint8_t *bytes = r.bytes, *bytes_end = bytes + r.num_bytes;
  const uint8_t *escapes = r.escapes, *escapes_end = escapes + r.num_escapes;
  uint64_t position = 0, limit = r.limit;
  for (int64_t i = 0; i < r.changes; i++) {
    uint64_t gap = 0;
    uint8_t byte;
    do {
      if (gaps == gaps_end) return kShortGaps;
      byte = *gaps++;
      if (byte != kLong) {
        gap += byte;
      } else {
        if (longs == longs_end) return kShortLongs;
        uint64_t whole = load<uint64_t>(longs);
        longs += 8;
        if (whole >= limit) return kBeyond;
        gap += whole;
      }
    } while (byte == kChain);
    if (gap >= limit) return kBeyond;
    if (r.is_wide) gap = gap << 8 | r.lows[i];
    if (gap >= limit - position) return kBeyond;
    position += gap;
    T step = r.steps[i >> 1] >> (i & 1) * 4 & 15;
    if (__builtin_expect(step == kByte, 0)) {
      if (bytes == bytes_end) return kShortBytes;
      step = *bytes++;
    }
    if (sizeof(T) > 1 && __builtin_expect(step == kEscape, 0)) {
      if (escapes == escapes_end) return kShortEscapes;
      step = load<T>(escapes);
      escapes += sizeof(T);
    } else {
      step = T(step >> 1) ^ T(-T(step & 1));
    }
    sink(position, step);
    position++;
  }
  bool is_done = gaps == gaps_end && longs == longs_end && bytes == bytes_end && escapes == escapes_end;
  return is_done ? kFine : kLeftOver;
}

template <class T> int unpack_of(const Reader *track, uint64_t *positions, void *steps) {
  T *to = static_cast<T *>(steps);
  auto sink = [&](uint64_t position, T step) {
    *positions++ = position;
    *to++ = step;
  };
  return walk<T>(*track, sink);
}

template <class T>
int locate_of(const void *old_values, uint64_t n, const uint32_t *floors, int num_classes,
              const uint64_t *const *ranks, const void *const *steps, const int64_t *changes, const uint64_t *elements,
              uint64_t *positions, void *out_steps) {
  const T *old = static_cast<const T *>(old_values);
  T *to = static_cast<T *>(out_steps), padded[64];
  Classes<T> classes(floors, num_classes);
  uint64_t seen[kMaxClasses] = {}, next[kMaxClasses];
  int64_t done[kMaxClasses] = {};
  for (int k = 0; k < num_classes; k++) next[k] = changes[k] ? ranks[k][0] : ~uint64_t(0);
  for (uint64_t start = 0; start < n; start += 64) {
    const T *block = old + start;
    uint64_t masks[kMaxClasses], valid = ~uint64_t(0), changed = 0;
    if (n - start < 64) {
      memset(padded, 0, sizeof padded);
      memcpy(padded, block, (n - start) * sizeof(T));
      block = padded;
      valid = (uint64_t(1) << (n - start)) - 1;
    }
    classes64(block, classes, masks);
    T moves[64];
    for (int k = 0; k < num_classes; k++) {
      uint64_t mask = masks[k] & valid, end = seen[k] + uint64_t(__builtin_popcountll(mask));
      while (next[k] < end) {
        int i = select64(mask, next[k] - seen[k]);
        changed |= uint64_t(1) << i;
        moves[i] = static_cast<const T *>(steps[k])[done[k]];
        next[k] = ++done[k] < changes[k] ? ranks[k][done[k]] : ~uint64_t(0);
      }
      seen[k] = end;
    }
    for (; changed; changed &= changed - 1) {
      int i = __builtin_ctzll(changed);
      *positions++ = start + uint64_t(i);
      *to++ = moves[i];
    }
  }
  for (int k = 0; k < num_classes; k++)
    if (seen[k] != elements[k] || done[k] != changes[k]) return kClassSize;
  return kFine;
}

// ---- patching

// Adds or subtracts steps, and takes the witness of the old values on the way.
template <class T, bool has_rows, bool subtracts> struct Patch {
  T *row;
  Rows rows;
  uint64_t row_start = 0, witness = 0;

  Patch(T *target, Rows rows) : row(target), rows(rows) {}

  INLINE T *at(Patch &p, uint64_t position) {
    if (!has_rows) return p.row + position;
    uint64_t column = position - p.row_start;
    if (column >= uint64_t(p.rows.columns)) {
      uint64_t further = column / uint64_t(p.rows.columns);
      p.row += further * uint64_t(p.rows.stride);
      p.row_start += further * uint64_t(p.rows.columns);
      column = position - p.row_start;
    }
    return p.row + column;
  }
  void operator()(uint64_t position, T step) {
    T *value = at(*this, position), before = *value;
    *value = subtracts ? T(before - step) : T(before + step);
    witness += witness_of(position, subtracts ? *value : before);
  }
};

template <class T, class Position, bool has_rows, bool subtracts>
uint64_t patch_all(T *target, const Position *positions, const T *steps, int64_t n, Rows rows) {
  Patch<T, has_rows, subtracts> patch(target, rows);
  for (int64_t i = 0; i < n; i++) patch(positions[i], steps[i]);
  return patch.witness;
}

template <class T, class Position>
int patch_of(T *target, const Position *positions, const T *steps, int64_t n, uint64_t limit, Rows rows, bool subtracts,
             const uint64_t *witness) {
  bool ascends = true;
  for (int64_t i = 1; i < n; i++) ascends &= positions[i - 1] < positions[i];
  if (n && (!ascends || positions[n - 1] >= limit)) return kBeyond;
  using Run = uint64_t (*)(T *, const Position *, const T *, int64_t, Rows);
  constexpr Run runs[2][2] = {{patch_all<T, Position, false, false>, patch_all<T, Position, false, true>},
                              {patch_all<T, Position, true, false>, patch_all<T, Position, true, true>}};
  bool has_rows = rows.columns > 0;
  uint64_t found = runs[has_rows][subtracts](target, positions, steps, n, rows);
  if (!witness || found == *witness) return kFine;
  runs[has_rows][!subtracts](target, positions, steps, n, rows);
  return kWitness;
}

template <class T, bool has_rows> int patch_track_of(T *target, const Reader &track, Rows rows, const uint64_t *witness) {
  auto nothing = [](uint64_t, T) {};
  Fault fault = walk<T>(track, nothing);  // whole before the first write
  if (fault != kFine) return fault;
  Patch<T, has_rows, false> patch(target, rows);
  walk<T>(track, patch);
  if (!witness || patch.witness == *witness) return kFine;
  Patch<T, has_rows, true> back(target, rows);
  walk<T>(track, back);
  return kWitness;
}

// ---- by element size

int64_t find_any(int size, const void *old, const void *now, int64_t n, uint64_t start, const uint32_t *floors,
                 int num_classes, Writer *writers, uint64_t *witness) {
  auto run = size == 1 ? find_of<uint8_t> : size == 2 ? find_of<uint16_t> : find_of<uint32_t>;
  return run(old, now, n, start, floors, num_classes, writers, witness);
}

void pack_any(int size, const uint64_t *positions, const void *steps, int64_t n, Writer *writer) {
  auto run = size == 1 ? pack_of<uint8_t> : size == 2 ? pack_of<uint16_t> : pack_of<uint32_t>;
  run(positions, steps, n, writer);
}

int unpack_any(int size, const Reader *track, uint64_t *positions, void *steps) {
  auto run = size == 1 ? unpack_of<uint8_t> : size == 2 ? unpack_of<uint16_t> : unpack_of<uint32_t>;
  return run(track, positions, steps);
}

int locate_any(int size, const void *old, uint64_t n, const uint32_t *floors, int num_classes,
               const uint64_t *const *ranks, const void *const *steps, const int64_t *changes,
               const uint64_t *elements, uint64_t *positions, void *out_steps) {
  auto run = size == 1 ? locate_of<uint8_t> : size == 2 ? locate_of<uint16_t> : locate_of<uint32_t>;
  return run(old, n, floors, num_classes, ranks, steps, changes, elements, positions, out_steps);
}

template <class T>
int patch_sized(void *target, const void *positions, int position_size, const void *steps, int64_t n, uint64_t limit,
                Rows rows, int subtracts, const uint64_t *witness) {
  T *to = static_cast<T *>(target);
  const T *by = static_cast<const T *>(steps);
  if (position_size == 4)
    return patch_of<T>(to, static_cast<const uint32_t *>(positions), by, n, limit, rows, subtracts, witness);
  return patch_of<T>(to, static_cast<const uint64_t *>(positions), by, n, limit, rows, subtracts, witness);
}

int patch_any(int size, void *target, const void *positions, int position_size, const void *steps, int64_t n,
              uint64_t limit, Rows rows, int subtracts, const uint64_t *witness) {
  auto run = size == 1 ? patch_sized<uint8_t> : size == 2 ? patch_sized<uint16_t> : patch_sized<uint32_t>;
  return run(target, positions, position_size, steps, n, limit, rows, subtracts, witness);
}

template <class T> int patch_track_sized(void *target, const Reader *track, Rows rows, const uint64_t *witness) {
  auto run = rows.columns > 0 ? patch_track_of<T, true> : patch_track_of<T, false>;
  return run(static_cast<T *>(target), *track, rows, witness);
}

int patch_track_any(int size, void *target, const Reader *track, Rows rows, const uint64_t *witness) {
  auto run = size == 1 ? patch_track_sized<uint8_t>
                       : size == 2 ? patch_track_sized<uint16_t> : patch_track_sized<uint32_t>;
  return run(target, track, rows, witness);
}

}  // namespace

extern const Kernels MW_ISA;
const Kernels MW_ISA = {find_any, pack_any, unpack_any, locate_any, patch_any, patch_track_any};
