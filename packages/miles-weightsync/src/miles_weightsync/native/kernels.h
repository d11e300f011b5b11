// What Python calls. Element types are given by their size in bytes: 1, 2 or 4.
#pragma once
#include <cstdint>

constexpr int kMaxClasses = 16;

// One track while it is written. Buffers have room for every element of a chunk.
struct Writer {
  uint8_t *gaps, *lows, *longs, *steps, *bytes, *escapes;
  int64_t num_gaps, num_lows, num_longs, num_steps, num_bytes, num_escapes;  // bytes in each
  uint64_t next;                                                  // position after the last change
  uint64_t elements;                                              // of this track's class, seen so far
  int64_t changes;                                                // so far
  int64_t is_wide;
  int64_t pending;                                                // the lower half of the next byte of `steps`
};

// One track as it is read.
struct Reader {
  const uint8_t *gaps, *lows, *longs, *steps, *bytes, *escapes;
  int64_t num_gaps, num_longs, num_bytes, num_escapes;  // bytes; lows have one a change, steps half of one
  int64_t changes;
  int64_t is_wide;
  uint64_t limit;  // positions are below this
};

// Where position p lies: p itself, or row p / columns of rows that begin `stride` apart, where columns > 0.
struct Rows {
  int64_t columns, stride;
};

enum Fault : int {
  kFine = 0,
  kShortGaps,     // gaps end before the changes do
  kShortLongs,    // likewise 64-bit gaps
  kShortBytes,    // likewise the steps of a byte
  kShortEscapes,  // likewise those of an element
  kBeyond,        // a position at or past the limit
  kLeftOver,      // a stream goes on after the last change
  kClassSize,     // a class of the old values has another size
  kWitness,       // other old values stand where the changes belong
};

struct Kernels {
  // Changes among `n` elements from index `start` on go to the writers of their classes; returns how many, and adds
  // to the witness.
  int64_t (*find)(int size, const void *old, const void *now, int64_t n, uint64_t start, const uint32_t *floors,
                  int num_classes, Writer *writers, uint64_t *witness);
  // Ascending positions and their steps go to the writer.
  void (*pack)(int size, const uint64_t *positions, const void *steps, int64_t n, Writer *writer);
  int (*unpack)(int size, const Reader *track, uint64_t *positions, void *steps);
  // Ranks within classes to positions among `n` elements, ascending, with their steps.
  int (*locate)(int size, const void *old, uint64_t n, const uint32_t *floors, int num_classes,
                const uint64_t *const *ranks, const void *const *steps, const int64_t *changes,
                const uint64_t *elements, uint64_t *positions, void *out_steps);
  // In place, at ascending positions below `limit`. Where the witness is given and differs, nothing is changed in the
  // end.
  int (*patch)(int size, void *target, const void *positions, int position_size, const void *steps, int64_t n,
               uint64_t limit, Rows rows, int subtracts, const uint64_t *witness);
  int (*patch_track)(int size, void *target, const Reader *track, Rows rows, const uint64_t *witness);
};
