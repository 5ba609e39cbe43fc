#include "arena.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>

#include "clock.h"
#include "error.h"
#include "memory_limit.h"

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U
#endif

namespace tide {
namespace {

constexpr uint64_t kReserveStep = uint64_t{64} << 20;
constexpr uint64_t kSmallestStep = uint64_t{64} << 10;
constexpr uint64_t kMaxFileBytes = uint64_t{1} << 62;

uint64_t round_up(uint64_t value, uint64_t unit) { return (value + unit - 1) / unit * unit; }

uint32_t checked(const char* name, int64_t value, int64_t low, int64_t high) {
  if (value < low || value > high)
    throw std::invalid_argument(std::string(name) + " is " + std::to_string(value) + "; allowed: " +
                                std::to_string(low) + " to " + std::to_string(high));
  return static_cast<uint32_t>(value);
}

uint64_t control_size(uint32_t ranks, uint32_t counters) {
  return round_up(kHeaderBytes + sizeof(TagRing) * ranks + sizeof(Cell) * uint64_t{ranks} * counters,
                  page_bytes());
}

int new_memory_file() {
  // Systems may refuse executable memory files, older kernels do not know the flag that says so.
  int fd = ::memfd_create("tide-arena", MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_NOEXEC_SEAL);
  if (fd < 0 && errno == EINVAL) fd = ::memfd_create("tide-arena", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) throw_os(errno, "cannot create the arena's memory file");
  if (::fchmod(fd, 0600) != 0) {
    const int error = errno;
    ::close(fd);
    throw_os(error, "cannot make the arena's memory file private");
  }
  return fd;
}

// Spinning pays only where every rank can run at once; elsewhere it takes the core from the very rank
// that is awaited.
uint64_t choose_spin_ns(uint32_t ranks) {
  cpu_set_t set;
  if (::sched_getaffinity(0, sizeof set, &set) != 0) return 0;
  return static_cast<uint32_t>(CPU_COUNT(&set)) >= ranks ? 40000 : 0;
}

struct stat file_stat(int fd) {
  struct stat st;
  if (::fstat(fd, &st) != 0) throw_os(errno, "cannot stat the arena's file");
  return st;
}

std::string range_words(uint64_t begin, uint64_t end) {
  return "bytes " + std::to_string(begin) + " to " + std::to_string(end) + " of the arena";
}

}  // namespace

size_t page_bytes() {
  static const size_t bytes = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  return bytes;
}

Arena::Arena(int fd, uint32_t ranks, uint32_t rank, uint32_t counters, uint64_t control_bytes)
    : fd_(fd), ranks_(ranks), rank_(rank), counters_(counters), control_bytes_(control_bytes),
      spin_ns_(choose_spin_ns(ranks)), peers_(ranks), lost_(ranks) {
  ledger_.totals.assign(size_t{ranks} * counters, 0);
  ledger_.marks.assign(counters, 0);
}

Arena::~Arena() {
  if (header_ != nullptr) ::munmap(header_, control_bytes_);
  ::close(fd_);
}

void Arena::map_control() {
  void* p = ::mmap(nullptr, control_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_, 0);
  if (p == MAP_FAILED) throw_os(errno, "cannot map the arena's control region");
  auto* base = static_cast<unsigned char*>(p);
  header_ = reinterpret_cast<Header*>(base);
  rings_ = reinterpret_cast<TagRing*>(base + kHeaderBytes);
  cells_ = reinterpret_cast<Cell*>(base + kHeaderBytes + sizeof(TagRing) * ranks_);
}

std::shared_ptr<Arena> Arena::create(int64_t ranks, int64_t rank, int64_t counters) {
  const uint32_t n = checked("ranks", ranks, 1, kMaxRanks);
  const uint32_t r = checked("rank", rank, 0, ranks - 1);
  const uint32_t c = checked("counters", counters, 0, kMaxCounters);
  const uint64_t control = control_size(n, c);
  std::shared_ptr<Arena> arena(new Arena(new_memory_file(), n, r, c, control));
  arena->reserve(0, static_cast<int64_t>(control));
  // No rank can take the file's length away from under a mapping (that would be a SIGBUS).
  if (::fcntl(arena->fd_, F_ADD_SEALS, F_SEAL_SHRINK) != 0) throw_os(errno, "cannot seal the arena");
  arena->map_control();
  Header* h = arena->header_;  // fresh memory is zero: counters, rings and the abort record start so
  std::memcpy(h->magic, kMagic, sizeof kMagic);
  h->version = kLayoutVersion;
  h->ranks = n;
  h->counters = c;
  h->control_bytes = control;
  return arena;
}

std::shared_ptr<Arena> Arena::attach(int fd, int64_t ranks, int64_t rank, int64_t counters) {
  const uint32_t n = checked("ranks", ranks, 1, kMaxRanks);
  const uint32_t r = checked("rank", rank, 0, ranks - 1);
  const uint32_t c = checked("counters", counters, 0, kMaxCounters);
  const uint64_t control = control_size(n, c);
  const int own = ::fcntl(fd, F_DUPFD_CLOEXEC, 3);
  if (own < 0) throw_os(errno, "cannot duplicate file descriptor " + std::to_string(fd));
  std::shared_ptr<Arena> arena(new Arena(own, n, r, c, control));  // owns the descriptor from here on
  const struct stat st = file_stat(own);
  if (st.st_uid != ::geteuid())
    throw_os(EPERM, "the arena's file belongs to user " + std::to_string(st.st_uid));
  const int seals = ::fcntl(own, F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0)
    throw std::invalid_argument("not an arena: the descriptor is not a sealed memory file");
  if (static_cast<uint64_t>(st.st_size) < sizeof(Header))
    throw std::invalid_argument("not an arena: the file has only " + std::to_string(st.st_size) + " bytes");
  Header seen;
  if (::pread(own, static_cast<void*>(&seen), sizeof seen, 0) != static_cast<ssize_t>(sizeof seen))
    throw_os(errno != 0 ? errno : EIO, "cannot read the arena's header");
  if (std::memcmp(seen.magic, kMagic, sizeof kMagic) != 0)
    throw std::invalid_argument("not an arena: wrong magic at its start");
  const auto same = [](const char* name, uint64_t theirs, uint64_t ours) {
    if (theirs != ours)
      throw std::invalid_argument(std::string("the arena was created with ") + name + " " +
                                  std::to_string(theirs) + ", this rank expects " + std::to_string(ours));
  };
  same("layout version", seen.version, kLayoutVersion);
  same("ranks", seen.ranks, n);
  same("counters", seen.counters, c);
  same("control bytes", seen.control_bytes, control);
  if (static_cast<uint64_t>(st.st_size) < control)
    throw std::invalid_argument("not an arena: the file is shorter than its control region");
  arena->map_control();
  return arena;
}

uint64_t Arena::bytes() const { return static_cast<uint64_t>(file_stat(fd_).st_size); }

uint64_t Arena::allocated_bytes() const { return static_cast<uint64_t>(file_stat(fd_).st_blocks) * 512; }

// An upper bound on how much of the range has no memory yet: all beyond the end of the file, and within
// it no more than the file's holes. Exact where the arena grows at its end, as it does.
uint64_t Arena::missing_bytes(uint64_t begin, uint64_t end) const {
  const struct stat st = file_stat(fd_);
  const uint64_t size = static_cast<uint64_t>(st.st_size);
  const uint64_t allocated = static_cast<uint64_t>(st.st_blocks) * 512;
  const uint64_t tail = end > size ? end - std::max(size, begin) : 0;
  const uint64_t holes = size > allocated ? size - allocated : 0;
  return tail + std::min(end - begin - tail, holes);
}

void Arena::reserve(int64_t offset, int64_t bytes) {
  if (offset < 0 || bytes < 0)
    throw std::invalid_argument("reserve: offset " + std::to_string(offset) + " and bytes " +
                                std::to_string(bytes) + " must not be negative");
  if (bytes == 0) return;
  const uint64_t page = page_bytes();
  if (static_cast<uint64_t>(offset) + static_cast<uint64_t>(bytes) > kMaxFileBytes)
    throw_os(EFBIG, "cannot reserve " + std::to_string(bytes) + " bytes at " + std::to_string(offset));
  const uint64_t begin = static_cast<uint64_t>(offset) / page * page;
  const uint64_t end = round_up(static_cast<uint64_t>(offset) + static_cast<uint64_t>(bytes), page);
  const std::string range = range_words(begin, end);
  // The kernel would send SIGXFSZ, which kills.
  if (end > file_size_limit())
    throw_os(EFBIG, "cannot reserve " + range + ": RLIMIT_FSIZE is " + std::to_string(file_size_limit()));
  while (true) {
    const uint64_t free = available_bytes();
    const uint64_t before = allocated_bytes();
    const uint64_t missing = missing_bytes(begin, end);
    if (missing <= free) break;
    // Another rank may be half-way through reserving the same range: what it took is missing from
    // `free` and not yet part of the file's length. Judge again once it stands still.
    sleep_ns(30'000'000);
    if (allocated_bytes() == before)
      throw_os(ENOMEM, "cannot reserve " + range + ": " + std::to_string(missing) + " bytes are needed, " +
                           std::to_string(free) + " are available");
  }
  // In steps, smaller after every interruption: an interrupted fallocate undoes what it did, and a process
  // with a fast timer would never get through a large one.
  uint64_t step = kReserveStep;
  for (uint64_t at = begin; at < end;) {
    const uint64_t part = std::min(end - at, step);
    if (::fallocate(fd_, 0, static_cast<off_t>(at), static_cast<off_t>(part)) == 0) {
      at += part;
    } else if (errno == EINTR) {
      step = std::max(step / 2, kSmallestStep);
    } else {
      throw_os(errno, "cannot reserve " + range);
    }
  }
}

void Arena::release(int64_t offset, int64_t bytes) {
  if (offset < 0 || bytes < 0 || static_cast<uint64_t>(offset) < control_bytes_)
    throw std::invalid_argument("release: the range must lie behind the control region (" +
                                std::to_string(control_bytes_) + " bytes); got offset " +
                                std::to_string(offset) + ", bytes " + std::to_string(bytes));
  const uint64_t page = page_bytes();
  const uint64_t begin = round_up(static_cast<uint64_t>(offset), page);
  const uint64_t end = (static_cast<uint64_t>(offset) + static_cast<uint64_t>(bytes)) / page * page;
  if (begin >= end) return;
  while (::fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(begin),
                     static_cast<off_t>(end - begin)) != 0) {
    if (errno != EINTR) throw_os(errno, "cannot release " + range_words(begin, end));
  }
}

void Arena::check_mappable(int64_t offset, uint64_t bytes) const {
  if (offset < 0 || static_cast<uint64_t>(offset) % page_bytes() != 0)
    throw std::invalid_argument("the offset must be a multiple of " + std::to_string(page_bytes()) + "; got " +
                                std::to_string(offset));
  const uint64_t size = this->bytes();
  if (static_cast<uint64_t>(offset) > size || bytes > size - static_cast<uint64_t>(offset))
    throw std::invalid_argument(std::to_string(bytes) + " bytes at " + std::to_string(offset) +
                                " are not within the arena's " + std::to_string(size) +
                                " bytes: reserve them first");
}

void Arena::watch(int64_t rank, int64_t pid) {
  const uint32_t r = checked("rank", rank, 0, int64_t{ranks_} - 1);
  Peer peer(static_cast<int>(checked("pid", pid, 1, INT32_MAX)));
  std::lock_guard<std::mutex> hold(peers_lock_);
  peers_[r] = std::move(peer);
}

void Arena::lose(int64_t rank) {
  const uint32_t r = checked("rank", rank, 0, int64_t{ranks_} - 1);
  std::lock_guard<std::mutex> hold(peers_lock_);
  lost_[r] = true;
}

bool Arena::peer_dead(uint32_t rank) const {
  std::lock_guard<std::mutex> hold(peers_lock_);
  return lost_[rank] || peers_[rank].dead();
}

bool Arena::abort(int64_t code, std::string_view message, int64_t rank) {
  const uint32_t r = checked("rank", rank, 0, int64_t{ranks_} - 1);
  if (code < INT32_MIN || code > INT32_MAX)
    throw std::invalid_argument("abort code " + std::to_string(code) + " does not fit 32 bits");
  const uint64_t claim = uint64_t{r + 1} << 32 | static_cast<uint32_t>(code);
  uint64_t none = 0;
  if (!header_->abort_claim.compare_exchange_strong(none, claim)) return false;
  header_->abort_length = static_cast<uint32_t>(std::min<size_t>(message.size(), kAbortMessageBytes));
  std::memcpy(header_->abort_message, message.data(), header_->abort_length);
  header_->abort_ready.store(1, std::memory_order_release);
  return true;  // sleeping waiters look within one slice of their wait
}

std::optional<AbortInfo> Arena::aborted() const {
  const uint64_t claim = header_->abort_claim.load(std::memory_order_acquire);
  if (claim == 0) return std::nullopt;
  AbortInfo info{static_cast<int>(claim >> 32) - 1, static_cast<int>(static_cast<uint32_t>(claim)), ""};
  // The message follows the claim at once, unless its writer was killed in between.
  for (int i = 0; i < 20 && header_->abort_ready.load(std::memory_order_acquire) == 0; ++i) sleep_ns(1'000'000);
  if (header_->abort_ready.load(std::memory_order_acquire) != 0)
    info.message.assign(header_->abort_message, std::min(header_->abort_length, kAbortMessageBytes));
  return info;
}

uint64_t Arena::latest_tag(uint32_t writer) const {
  uint64_t latest = 0;
  for (const std::atomic<uint64_t>& entry : rings_[writer].entries) {
    const uint64_t seen = entry.load(std::memory_order_acquire);
    if (seen == 0) continue;
    const auto ahead = static_cast<int32_t>(static_cast<uint32_t>(seen >> 32) - static_cast<uint32_t>(latest >> 32));
    if (latest == 0 || ahead > 0) latest = seen;
  }
  return latest;
}

void Arena::publish_tag_of(uint32_t writer, uint32_t seq, uint32_t tag) {
  std::atomic<uint64_t>& entry = rings_[writer].entries[seq % kTagSlots];
  const uint64_t seen = entry.load(std::memory_order_relaxed);
  // The last streams of an old call may run after a newer call has begun.
  const auto ahead = static_cast<int32_t>(seq - static_cast<uint32_t>(seen >> 32));
  if (seen == 0 || ahead > 0) entry.store(tag_entry(seq, tag), std::memory_order_release);
}

}  // namespace tide
