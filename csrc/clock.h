// Monotonic time.
#pragma once

#include <time.h>

#include <cstdint>

namespace tide {

inline int64_t now_ns() {
  struct timespec t;
  ::clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t{t.tv_sec} * 1'000'000'000 + t.tv_nsec;
}

// At most `ns`: a signal ends it early.
inline void sleep_ns(int64_t ns) {
  const struct timespec t = {static_cast<time_t>(ns / 1'000'000'000), static_cast<long>(ns % 1'000'000'000)};
  ::nanosleep(&t, nullptr);
}

}  // namespace tide
