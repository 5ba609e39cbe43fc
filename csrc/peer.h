// Noticing that another process of the host has died.
#pragma once

#include <cstdint>

namespace tide {

// Watches one process: through a pidfd where the kernel has them, else through its state and start time
// in /proc (the start time tells a reused process id). A zombie counts as dead.
class Peer {
 public:
  Peer() = default;
  explicit Peer(int pid);  // OsError(ESRCH) if there is no such process
  ~Peer();
  Peer(Peer&& other) noexcept;
  Peer& operator=(Peer&& other) noexcept;
  Peer(const Peer&) = delete;
  Peer& operator=(const Peer&) = delete;

  bool watched() const { return pid_ > 0; }
  bool dead() const;  // false while nothing is watched

 private:
  int pid_ = 0;
  int pidfd_ = -1;
  uint64_t start_time_ = 0;
};

}  // namespace tide
