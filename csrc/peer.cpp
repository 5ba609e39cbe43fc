#include "peer.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>
#include <utility>

#include "error.h"

namespace tide {
namespace {

#ifdef SYS_pidfd_open
constexpr long kPidfdOpen = SYS_pidfd_open;
#else
constexpr long kPidfdOpen = 434;  // the same number on every architecture; older C libraries lack the name
#endif

// State letter and start time from /proc/<pid>/stat; false if the process is gone.
bool read_stat(int pid, char* state, uint64_t* start_time) {
  std::ifstream in("/proc/" + std::to_string(pid) + "/stat");
  const std::string text((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
  const size_t name_end = text.rfind(')');  // the name may hold spaces and parentheses
  if (name_end == std::string::npos) return false;
  std::istringstream fields(text.substr(name_end + 1));
  std::string skip;
  fields >> *state;                              // field 3
  for (int i = 4; i < 22; ++i) fields >> skip;   // fields 4 to 21
  return static_cast<bool>(fields >> *start_time);  // field 22
}

bool is_dead_state(char state) { return state == 'Z' || state == 'X' || state == 'x'; }

}  // namespace

Peer::Peer(int pid) : pid_(pid) {
  char state = 0;
  const int fd = static_cast<int>(::syscall(kPidfdOpen, pid, 0));
  if (fd >= 0) {
    pidfd_ = fd;  // close-on-exec by definition
  } else if (errno == ESRCH || !read_stat(pid, &state, &start_time_) || is_dead_state(state)) {
    throw_os(ESRCH, "cannot watch process " + std::to_string(pid));
  }
}

Peer::~Peer() {
  if (pidfd_ >= 0) ::close(pidfd_);
}

Peer::Peer(Peer&& other) noexcept { *this = std::move(other); }

Peer& Peer::operator=(Peer&& other) noexcept {
  std::swap(pid_, other.pid_);
  std::swap(pidfd_, other.pidfd_);
  std::swap(start_time_, other.start_time_);
  return *this;
}

bool Peer::dead() const {
  if (!watched()) return false;
  if (pidfd_ >= 0) {
    struct pollfd p = {pidfd_, POLLIN, 0};
    return ::poll(&p, 1, 0) == 1 && (p.revents & (POLLIN | POLLHUP)) != 0;
  }
  char state = 0;
  uint64_t start_time = 0;
  if (!read_stat(pid_, &state, &start_time)) return true;
  return is_dead_state(state) || start_time != start_time_;
}

}  // namespace tide
