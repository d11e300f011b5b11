// The table for the best instruction set of this machine, or for one asked for by name.
#include <cstring>

#include "kernels.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

extern const Kernels mw_portable;
#ifdef MW_X86
extern const Kernels mw_avx2, mw_avx512;
#endif

namespace {

struct Choice {
  const char *name;
  const Kernels *kernels;
  bool runs_here;
};

const Choice *choose(const char *name) {
#ifdef MW_X86
  __builtin_cpu_init();
  static const bool has_avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("popcnt");
  static const Choice choices[] = {
      {"avx512", &mw_avx512, has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")},
      {"avx2", &mw_avx2, has_avx2},
      {"portable", &mw_portable, true},
  };
#else
  static const Choice choices[] = {{"portable", &mw_portable, true}};
#endif
  for (const Choice &choice : choices)
    if (choice.runs_here && (!name || !*name || !strcmp(name, choice.name))) return &choice;
  return nullptr;
}

}  // namespace

// Null where the machine does not run the instruction set that is asked for.
EXPORT const char *mw_isa(const char *name) {
  const Choice *choice = choose(name);
  return choice ? choice->name : nullptr;
}

EXPORT const Kernels *mw_kernels(const char *name) {
  const Choice *choice = choose(name);
  return choice ? choice->kernels : nullptr;
}

// Of the sources this was built from: a library left over from older ones is not used.
EXPORT const char *mw_sources() { return MW_SOURCES; }
