// A schedule in encoded form, checked once, and its replay.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "arena.h"
#include "counter.h"
#include "kernels.h"
#include "scaling.h"

namespace tide {

constexpr size_t kWordsPerOp = 12;
using Op = std::array<int64_t, kWordsPerOp>;

enum Opcode : int64_t { kCopy = 0, kSum = 1, kZero = 2, kNotify = 3, kAwait = 4 };
enum SumFlag : int64_t { kAccumulate = 1, kScaled = 2 };
// Reader of a notification; shared memory has one cell for all readers and ignores the word.
constexpr int64_t kEveryOther = -2;
enum DType : int64_t { kFp32 = 0, kBf16 = 1, kRaw = 2 };

constexpr int64_t dtype_bytes(int64_t dtype) { return dtype == kFp32 ? 4 : dtype == kBf16 ? 2 : 1; }

struct Source {
  int64_t base;
  int64_t offset;
};

struct Stream {
  size_t first;
  size_t count;
};

struct Advance {
  uint32_t counter;  // local id
  uint32_t writer;
  uint32_t amount;
};

// Immutable after construction. The constructor throws std::invalid_argument for anything that is
// malformed, naming the op and the word.
class Program {
 public:
  struct Parts {
    std::string_view ops;      // little-endian int64, kWordsPerOp each
    std::string_view sources;  // pairs of little-endian int64
    std::vector<std::pair<int64_t, int64_t>> streams;
    int64_t n_bases;
    int64_t n_counters;
    std::vector<std::array<int64_t, 3>> advance;
  };
  explicit Program(const Parts& parts);

  struct AwaitSlot {
    uint32_t counter;  // local id
    uint32_t writer;
  };

  const std::vector<Op>& ops() const { return ops_; }
  const std::vector<Source>& sources() const { return sources_; }
  const std::vector<Stream>& streams() const { return streams_; }
  const std::vector<Advance>& advance() const { return advance_; }
  // The distinct (counter, writer) pairs that are awaited, and which of them op i uses.
  const std::vector<AwaitSlot>& await_slots() const { return await_slots_; }
  uint32_t await_slot_of(size_t op) const { return await_slot_of_[op]; }
  size_t n_bases() const { return n_bases_; }
  size_t n_counters() const { return n_counters_; }
  int64_t highest_writer() const { return highest_writer_; }

 private:
  void check_op(size_t index);
  void index_awaits();

  std::vector<Op> ops_;
  std::vector<Source> sources_;
  std::vector<Stream> streams_;
  std::vector<Advance> advance_;
  std::vector<AwaitSlot> await_slots_;
  std::vector<uint32_t> await_slot_of_;
  size_t n_bases_ = 0;
  size_t n_counters_ = 0;
  int64_t highest_writer_ = -1;
};

struct Outcome {
  Status status = Status::kOk;
  int64_t op = -1;
  int64_t writer = -1;
  int64_t counter = -1;  // physical
  int64_t expected = 0;  // counter values, as the 32-bit cells hold them
  int64_t seen = 0;
  double waited_s = 0;
  int64_t peer_seq = -1;
  int64_t peer_tag = -1;
};

// One use of a program: addresses, counters, and the counters' totals before it. Its streams may run at
// different times, also between other calls.
class Call {
 public:
  Call(std::shared_ptr<Arena> arena, std::shared_ptr<const Program> program, std::vector<uint64_t> bases,
       std::vector<uint32_t> counters, uint32_t tag, float divisor);

  Outcome run(size_t stream, int64_t deadline_ns, void (*poll_signals)()) const;
  Outcome run_all(int64_t deadline_ns, void (*poll_signals)()) const;
  uint32_t seq() const { return seq_; }
  size_t n_streams() const { return program_->streams().size(); }

 private:
  unsigned char* at(int64_t base, int64_t offset) const {
    return reinterpret_cast<unsigned char*>(bases_[static_cast<size_t>(base)]) + offset;
  }
  void copy(const Op& op) const;
  void sum(const Op& op, std::vector<const void*>& scratch) const;
  Status await_op(size_t index, const Op& op, int64_t deadline_ns, void (*poll_signals)(), int64_t* waited_ns) const;
  void describe_failure(size_t index, const Op& op, Outcome* outcome) const;
  uint32_t target(size_t index, const Op& op) const {
    return await_base_[program_->await_slot_of(index)] + static_cast<uint32_t>(op[3]);
  }

  std::shared_ptr<Arena> arena_;
  std::shared_ptr<const Program> program_;
  std::vector<uint64_t> bases_;
  std::vector<uint32_t> counters_;
  std::vector<uint32_t> await_base_;  // per await slot
  uint32_t seq_ = 0;
  uint32_t tag_ = 0;
  Scaling scaling_;
};

}  // namespace tide
