#include "counter.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <ctime>

#include "clock.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tide {
namespace {

constexpr int64_t kSliceNs = 20'000'000;        // longest sleep: bounds how late an abort is seen
constexpr int64_t kHousekeepingNs = 100'000'000;  // how often to look for dead peers and signals

void cpu_pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");  // a few dozen cycles; `yield` is a no-op on most cores
#endif
}

// Shared futexes (no FUTEX_PRIVATE_FLAG): the two sides are different processes.
int futex_wait(const std::atomic<uint32_t>& word, uint32_t expected, int64_t ns) {
  const struct timespec t = {static_cast<time_t>(ns / 1'000'000'000), static_cast<long>(ns % 1'000'000'000)};
  return static_cast<int>(::syscall(SYS_futex, &word, FUTEX_WAIT, expected, &t, nullptr, 0));
}

void futex_wake_all(const std::atomic<uint32_t>& word) {
  ::syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void add(Cell& cell, uint32_t amount) {
  cell.value.fetch_add(amount, std::memory_order_seq_cst);  // see sleep_until_reached
  if (cell.waiters.load(std::memory_order_seq_cst) != 0) futex_wake_all(cell.value);
}

class Registration {
 public:
  explicit Registration(Cell& cell) : cell_(cell) { cell_.waiters.fetch_add(1, std::memory_order_seq_cst); }
  ~Registration() { cell_.waiters.fetch_sub(1, std::memory_order_relaxed); }
  Registration(const Registration&) = delete;
  Registration& operator=(const Registration&) = delete;

 private:
  Cell& cell_;
};

bool spin(const Cell& cell, uint32_t target, int64_t until_ns) {
  do {
    for (int i = 0; i < 16; ++i) {
      if (reached(cell.value.load(std::memory_order_acquire), target)) return true;
      cpu_pause();
    }
  } while (now_ns() < until_ns);
  return false;
}

Status sleep_until_reached(const Arena& arena, const Await& a, Cell& cell, int64_t start_ns) {
  // No wake-up is lost. The waiter writes `waiters`, then reads `value`; the notifier writes `value`,
  // then reads `waiters`; all four are sequentially consistent, so one of the two sees the other's
  // write. Either the waiter sees the new value and does not sleep, or the notifier sees the waiter and
  // calls FUTEX_WAKE; and FUTEX_WAIT sleeps only if the kernel, under the lock that FUTEX_WAKE takes,
  // still finds the old value. (Release and acquire would not do: both loads could then pass both
  // stores.) A waiter killed while registered leaves `waiters` above zero, which costs a system call
  // per notification and nothing else.
  Registration registered(cell);
  int64_t housekeeping_ns = start_ns + kHousekeepingNs;
  while (true) {
    const uint32_t value = cell.value.load(std::memory_order_seq_cst);
    if (reached(value, a.target)) return Status::kOk;
    if (arena.is_aborted()) return Status::kAborted;
    if (tags_differ(arena, a.writer, a.seq, a.tag)) return Status::kMismatch;
    const int64_t now = now_ns();
    const bool late = now >= a.deadline_ns;
    if (late || now >= housekeeping_ns) {
      housekeeping_ns = now + kHousekeepingNs;
      if (arena.peer_dead(a.writer)) {
        // It may have done its part, or said why it gives up, and then left.
        if (reached(cell.value.load(std::memory_order_seq_cst), a.target)) return Status::kOk;
        return arena.is_aborted() ? Status::kAborted : Status::kPeerDead;
      }
      a.poll_signals();
      if (late) {
        const bool done = reached(cell.value.load(std::memory_order_seq_cst), a.target);
        return done ? Status::kOk : Status::kTimeout;
      }
    }
    const int64_t slice = std::min(kSliceNs, a.deadline_ns - now);
    if (futex_wait(cell.value, value, slice) != 0 && errno == EINTR) a.poll_signals();
  }
}

}  // namespace

void notify(const Arena& arena, uint32_t counter, uint32_t amount) { add(arena.cell(counter, arena.rank()), amount); }

void deliver(Arena& arena, uint32_t counter, uint32_t writer, uint32_t amount, uint32_t seq, uint32_t tag) {
  if (seq != 0) arena.publish_tag_of(writer, seq, tag);
  add(arena.cell(counter, writer), amount);
}

bool tags_differ(const Arena& arena, uint32_t writer, uint32_t seq, uint32_t tag) {
  const uint64_t entry = arena.tag_at(writer, seq);
  return static_cast<uint32_t>(entry >> 32) == seq && static_cast<uint32_t>(entry) != tag;
}

Status await(const Arena& arena, const Await& a, int64_t* waited_ns) {
  Cell& cell = arena.cell(a.counter, a.writer);
  Status status = Status::kOk;
  if (!reached(cell.value.load(std::memory_order_acquire), a.target)) {
    const int64_t start = now_ns();
    const int64_t spin_end = std::min(a.deadline_ns, start + static_cast<int64_t>(arena.spin_ns()));
    if (spin_end <= start || !spin(cell, a.target, spin_end))
      status = sleep_until_reached(arena, a, cell, start);
    *waited_ns += now_ns() - start;
  }
  // The writer publishes its tag before it notifies, so the tag is visible by now.
  if (status == Status::kOk && a.same_call && tags_differ(arena, a.writer, a.seq, a.tag)) return Status::kMismatch;
  return status;
}

}  // namespace tide
