#include "kernels.h"

#include <atomic>
#include <stdexcept>

namespace tide {

extern const Kernels kernels_baseline;
#ifdef TIDE_X86_VARIANTS
extern const Kernels kernels_avx2;
extern const Kernels kernels_avx512;
#endif

namespace {

// Best last.
std::vector<const Kernels*> runnable() {
  std::vector<const Kernels*> list{&kernels_baseline};
#ifdef TIDE_X86_VARIANTS
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2")) list.push_back(&kernels_avx2);
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
    list.push_back(&kernels_avx512);
#endif
  return list;
}

std::atomic<const Kernels*>& chosen() {
  static std::atomic<const Kernels*> table{runnable().back()};
  return table;
}

}  // namespace

const Kernels& kernels() { return *chosen().load(std::memory_order_relaxed); }

std::vector<std::string> kernel_variants() {
  std::vector<std::string> names;
  for (const Kernels* k : runnable()) names.emplace_back(k->name);
  return names;
}

void use_kernels(const std::string& name) {
  for (const Kernels* k : runnable()) {
    if (name == k->name) {
      chosen().store(k, std::memory_order_relaxed);
      return;
    }
  }
  std::string allowed;
  for (const std::string& n : kernel_variants()) allowed += (allowed.empty() ? "" : ", ") + n;
  throw std::invalid_argument("no kernel variant \"" + name + "\" on this processor; there are: " + allowed);
}

}  // namespace tide
