// Layout of the control region at the front of every arena: header, call tags, counter cells.
//
// Everything that two processes touch at once is a lock-free atomic; the layout is fixed by the version
// number, so processes that run different builds refuse each other instead of misreading memory.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace tide {

constexpr char kMagic[8] = {'T', 'I', 'D', 'E', 'A', 'R', 'N', 'A'};
constexpr uint32_t kLayoutVersion = 1;
constexpr uint32_t kTagSlots = 64;
constexpr uint32_t kAbortMessageBytes = 400;
constexpr uint32_t kMaxRanks = 1024;
constexpr uint32_t kMaxCounters = 1u << 20;

struct Header {
  char magic[8];
  uint32_t version;
  uint32_t ranks;
  uint32_t counters;
  uint32_t reserved;
  uint64_t control_bytes;
  // Zero, or (rank + 1) << 32 | code of the first rank that aborted: one word, so that who and why are
  // known even if that rank is killed before its message is complete.
  alignas(64) std::atomic<uint64_t> abort_claim;
  std::atomic<uint32_t> abort_ready;  // 1 once length and message are written
  uint32_t abort_length;
  char abort_message[kAbortMessageBytes];
};

// One cell per (counter, writer rank), a cache line each: only the writer adds to the value, or whoever brings the
// notifications of a writer on another host.
struct alignas(64) Cell {
  std::atomic<uint32_t> value;
  std::atomic<uint32_t> waiters;
};

// A call's sequence number and tag in one word, so that a reader never sees half of an entry.
struct TagRing {
  std::atomic<uint64_t> entries[kTagSlots];  // seq << 32 | tag; zero: never used
};

constexpr uint64_t tag_entry(uint32_t seq, uint32_t tag) { return uint64_t{seq} << 32 | tag; }

constexpr size_t kHeaderBytes = 1024;
static_assert(sizeof(Header) <= kHeaderBytes, "the header outgrew its place");
static_assert(sizeof(Cell) == 64, "a cell is one cache line");
static_assert(sizeof(TagRing) == 8 * kTagSlots, "a ring is an array of words");
static_assert(std::atomic<uint32_t>::is_always_lock_free && std::atomic<uint64_t>::is_always_lock_free,
              "atomics between processes must be lock-free");

}  // namespace tide
