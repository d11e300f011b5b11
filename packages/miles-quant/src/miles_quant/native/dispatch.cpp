// The table for the best instruction set of this machine, or for one asked for by name.
#include <cstring>

#include "kernels.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

struct Choice {
  const char *name;
  const Kernels *kernels;
  bool runs_here;
};

const Choice *choose(const char *name) {
#ifdef MQ_X86
  __builtin_cpu_init();
  static const Choice choices[] = {
      {"avx512", &mq_avx512,
       __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl")},
      {"avx2", &mq_avx2, bool(__builtin_cpu_supports("avx2"))},
      {"portable", &mq_portable, true},
  };
#else
  static const Choice choices[] = {{"portable", &mq_portable, true}};
#endif
  for (const Choice &choice : choices)
    if (choice.runs_here && (!name || !*name || !strcmp(name, choice.name))) return &choice;
  return nullptr;
}

}  // namespace

// Null where the machine does not run the instruction set that is asked for.
EXPORT const char *mq_isa(const char *name) {
  const Choice *choice = choose(name);
  return choice ? choice->name : nullptr;
}

EXPORT const Kernels *mq_kernels(const char *name) {
  const Choice *choice = choose(name);
  return choice ? choice->kernels : nullptr;
}

// Of the sources this was built from: a library left over from older ones is not used.
EXPORT const char *mq_sources() { return MQ_SOURCES; }
