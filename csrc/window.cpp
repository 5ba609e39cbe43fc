#include "window.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "error.h"

namespace tide {
namespace {

constexpr uint64_t kSmallestTile = uint64_t{1} << 20;
constexpr uint64_t kLargestTile = uint64_t{64} << 20;
constexpr uint64_t kTilesPerWindow = 64;

uint64_t whole_pages(int64_t bytes) {
  if (bytes <= 0 || bytes > (int64_t{1} << 46))
    throw std::invalid_argument("bytes must be between 1 and 2**46; got " + std::to_string(bytes));
  const uint64_t page = page_bytes();
  return (static_cast<uint64_t>(bytes) + page - 1) / page * page;
}

// Huge pages are used only where the administrator lets shared memory have them; a refusal is no error.
void advise_huge(void* address, uint64_t bytes) { (void)::madvise(address, bytes, MADV_HUGEPAGE); }

int filled_memory_file(uint64_t bytes) {
  const int fd = ::memfd_create("tide-poison", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) throw_os(errno, "cannot create the poison file");
  int error = 0;
  if (::ftruncate(fd, static_cast<off_t>(bytes)) != 0) error = errno;
  const std::vector<unsigned char> ones(kSmallestTile, 0xFF);
  for (uint64_t at = 0; error == 0 && at < bytes;) {
    const ssize_t n = ::pwrite(fd, ones.data(), std::min<uint64_t>(ones.size(), bytes - at), static_cast<off_t>(at));
    if (n > 0) at += static_cast<uint64_t>(n);
    else if (errno != EINTR) error = errno;
  }
  // Nothing can write it any more; private mappings of it stay writable.
  if (error == 0 && ::fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE | F_SEAL_SHRINK | F_SEAL_GROW) != 0) error = errno;
  if (error != 0) {
    ::close(fd);
    throw_os(error, "cannot fill the poison file");
  }
  return fd;
}

// One file of 0xFF serves all windows, mapped many times over. It grows with the largest window so that
// no window needs more than a few dozen mappings (the kernel allows a process 65530).
struct PoisonFile {
  std::mutex lock;
  int fd = -1;
  uint64_t bytes = 0;

  void grow_for(uint64_t window_bytes) {
    uint64_t tile = kSmallestTile;
    while (tile < kLargestTile && tile * kTilesPerWindow < window_bytes) tile *= 2;
    if (fd >= 0 && bytes >= tile) return;
    const int larger = filled_memory_file(tile);
    if (fd >= 0) ::close(fd);  // mappings of it stay
    fd = larger;
    bytes = tile;
  }
};

PoisonFile& poison_file() {
  static PoisonFile* const file = new PoisonFile;  // never destroyed: windows may outlive static destructors
  return *file;
}

}  // namespace

Mapping::Mapping(const Arena& arena, int64_t offset, int64_t bytes) {
  mapped_bytes_ = whole_pages(bytes);
  bytes_ = static_cast<uint64_t>(bytes);
  arena.check_mappable(offset, mapped_bytes_);
  void* p = ::mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, arena.fd(), offset);
  if (p == MAP_FAILED) throw_os(errno, "cannot map " + std::to_string(bytes) + " bytes of the arena");
  address_ = p;
  advise_huge(address_, mapped_bytes_);
}

Mapping::~Mapping() {
  if (address_ != nullptr) ::munmap(address_, mapped_bytes_);
}

Window::Window(int64_t bytes) {
  mapped_bytes_ = whole_pages(bytes);
  bytes_ = static_cast<uint64_t>(bytes);
  void* p = ::mmap(nullptr, mapped_bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) throw_os(errno, "cannot reserve " + std::to_string(bytes) + " bytes of addresses");
  address_ = p;
}

Window::~Window() { ::munmap(address_, mapped_bytes_); }

// A failed fixed mapping may have taken the old one down: hold the addresses, so that nobody else's
// allocation lands there.
void Window::reset_after_failure(int error, const char* what) {
  ::mmap(address_, mapped_bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  throw_os(error, what);
}

void Window::map(const Arena& arena, int64_t offset) {
  arena.check_mappable(offset, mapped_bytes_);
  void* p = ::mmap(address_, mapped_bytes_, PROT_READ | PROT_WRITE, MAP_FIXED | MAP_SHARED | MAP_POPULATE,
                   arena.fd(), offset);
  if (p == MAP_FAILED) reset_after_failure(errno, "cannot map the arena into the window");
  advise_huge(address_, mapped_bytes_);
}

void Window::poison() {
  PoisonFile& file = poison_file();
  std::lock_guard<std::mutex> hold(file.lock);
  file.grow_for(mapped_bytes_);
  for (uint64_t at = 0; at < mapped_bytes_; at += file.bytes) {
    void* p = ::mmap(static_cast<unsigned char*>(address_) + at, std::min(file.bytes, mapped_bytes_ - at),
                     PROT_READ | PROT_WRITE, MAP_FIXED | MAP_PRIVATE | MAP_NORESERVE, file.fd, 0);
    if (p == MAP_FAILED) reset_after_failure(errno, "cannot poison the window");
  }
}

void advise_huge(uint64_t address, uint64_t bytes) {
  const uint64_t page = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
  const uint64_t first = (address + page - 1) / page * page, end = (address + bytes) / page * page;
  if (end > first) (void)::madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);
}

}  // namespace tide
