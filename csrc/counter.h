// Counters between processes: notify, and a wait that neither burns a core nor adds milliseconds.
#pragma once

#include <cstdint>

#include "arena.h"

namespace tide {

enum class Status { kOk, kTimeout, kPeerDead, kAborted, kMismatch };

// Whether `value` has come to `target`; counters wrap, so the difference decides, and it must stay
// below 2^31.
inline bool reached(uint32_t value, uint32_t target) { return static_cast<int32_t>(value - target) >= 0; }

// Adds to this rank's own cell of `counter`; whatever this thread wrote before is visible to whoever
// sees the new value.
void notify(const Arena& arena, uint32_t counter, uint32_t amount);

// Adds to the cell of a writer whose notifications a rail brings; `seq` and `tag` are of the writer's call, zero if
// there is none to tell of. Only one thread of the host may do so for a (counter, writer).
void deliver(Arena& arena, uint32_t counter, uint32_t writer, uint32_t amount, uint32_t seq, uint32_t tag);

struct Await {
  uint32_t counter;  // physical index
  uint32_t writer;
  uint32_t target;
  bool same_call;    // the awaited notification belongs to this call: its tag must match afterwards
  uint32_t seq;      // this call
  uint32_t tag;
  int64_t deadline_ns;
  void (*poll_signals)();  // may throw; called about every 100 ms and after an interrupted sleep
};

// True if the writer's ring holds another tag for this call.
bool tags_differ(const Arena& arena, uint32_t writer, uint32_t seq, uint32_t tag);

// Waits until the writer's cell has reached the target. `waited_ns` grows by the time spent.
Status await(const Arena& arena, const Await& a, int64_t* waited_ns);

}  // namespace tide
