#include "peer.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
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

enum class Stat { kRead, kGone, kUnknown };

// State letter and start time from /proc/<pid>/stat. Being out of descriptors says nothing about the process.
Stat read_stat(int pid, char* state, uint64_t* start_time) {
  const int fd = ::open(("/proc/" + std::to_string(pid) + "/stat").c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return errno == ENOENT || errno == ESRCH ? Stat::kGone : Stat::kUnknown;
  char buffer[1024];
  const ssize_t n = ::read(fd, buffer, sizeof buffer);
  const int error = errno;
  ::close(fd);
  if (n <= 0) return n < 0 && error != ESRCH ? Stat::kUnknown : Stat::kGone;
  const std::string text(buffer, static_cast<size_t>(n));
  const size_t name_end = text.rfind(')');  // the name may hold spaces and parentheses
  if (name_end == std::string::npos) return Stat::kUnknown;
  std::istringstream fields(text.substr(name_end + 1));
  std::string skip;
  fields >> *state;                             // field 3
  for (int i = 4; i < 22; ++i) fields >> skip;  // fields 4 to 21
  return fields >> *start_time ? Stat::kRead : Stat::kUnknown;  // field 22
}

bool is_dead_state(char state) { return state == 'Z' || state == 'X' || state == 'x'; }

}  // namespace

Peer::Peer(int pid) : pid_(pid) {
  const std::string what = "cannot watch process " + std::to_string(pid);
  pidfd_ = static_cast<int>(::syscall(kPidfdOpen, pid, 0));  // close-on-exec by definition
  if (pidfd_ >= 0) return;
  // Old kernels have no such call, sandboxes refuse it; any other error would meet /proc as well.
  if (errno != ENOSYS && errno != EPERM && errno != EINVAL) throw_os(errno, what);
  char state = 0;
  switch (read_stat(pid, &state, &start_time_)) {
    case Stat::kRead:
      if (is_dead_state(state)) throw_os(ESRCH, what);
      return;
    case Stat::kGone:
      throw_os(ESRCH, what);
    case Stat::kUnknown:
      throw_os(ENOSYS, what + ": neither pidfd_open nor /proc tells about it");
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
  switch (read_stat(pid_, &state, &start_time)) {
    case Stat::kRead:
      return is_dead_state(state) || start_time != start_time_;
    case Stat::kGone:
      return true;
    case Stat::kUnknown:
      break;
  }
  return false;
}

}  // namespace tide
