// How much memory this process may still take before something is killed for it.
#pragma once

#include <cstdint>
#include <string>

namespace tide {

constexpr uint64_t kUnlimited = UINT64_MAX;

// RLIMIT_FSIZE, which also bounds memory files; kUnlimited if none.
uint64_t file_size_limit();

// The least of: MemAvailable, the room left in every cgroup (v1 or v2) above this process that can be
// read, and RLIMIT_FSIZE. `proc` is where procfs is mounted. kUnlimited if nothing could be read.
uint64_t available_bytes(const std::string& proc = "/proc");

}  // namespace tide
