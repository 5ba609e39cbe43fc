// An encoded schedule as the device gets it: runs of like operations, each given to the driver at once.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "control.h"
#include "copies.h"
#include "../program.h"
#include "sum.h"

namespace tide::cuda {

struct Operand {
  int64_t base;
  int64_t offset;
};

struct Copy {
  Operand src, dst;
  CopyShape shape;
};

struct Clear {
  Operand dst;
  size_t bytes;
};

// A wait: until the cell has come to `value` above the slot's total before the call. A notification: the own
// cell has come to `value` above its total before the call. Taken: what a rail brought of another writer; this rank
// itself stores into the writer's cell that it has come to `value`.
struct Signal {
  enum Kind { kWait, kNotify, kTaken } kind;
  uint32_t counter;  // local id
  uint32_t slot;     // waits: in await_slots()
  int64_t reader;    // notifications: a rank, or kEveryOther
  uint32_t value;
};

struct Segment {
  enum Kind { kCopies, kClear, kSignals, kSums } kind;
  size_t first, count;  // in the list of that kind
  bool waits = false;
};

class Program {
 public:
  // `readers`: the ranks that "every other rank" stands for; empty: all of the control's. `lanes`: streams with the
  // same number are parts of one stream, given in order (Call::enqueue_lanes); empty: each is by itself.
  Program(const tide::Program::Parts& parts, const std::vector<int64_t>& readers, std::vector<int64_t> lanes);

  const tide::Program& table() const { return table_; }
  const std::vector<Segment>& segments(size_t stream) const { return streams_[stream]; }
  size_t n_streams() const { return streams_.size(); }
  size_t lane_of(size_t stream) const { return static_cast<size_t>(lanes_[stream]); }
  size_t n_lanes() const { return n_lanes_; }
  const std::vector<Copy>& copies() const { return copies_; }
  const std::vector<Clear>& clears() const { return clears_; }
  const std::vector<Signal>& signals() const { return signals_; }
  const std::vector<SumRun>& sums() const { return sums_; }
  const std::vector<SumKind>& sum_kinds() const { return kinds_; }
  // What kEveryOther stands for; empty: all other ranks of the control.
  const std::vector<uint32_t>& readers() const { return readers_; }

  // For the sums of one kind, by its number.
  void set_sum_kernel(const SumKernel& kernel, size_t kind, Device& device);
  // By kind; null where no kernel is set.
  std::vector<std::shared_ptr<const SumPlan>> sum_plans() const;

  // Throws unless the program can run on this control; remembers the last one that it was found to fit.
  void check_fits(const Control& control) const;

 private:
  void compile_stream(size_t stream, std::vector<int64_t>& notifier);
  void add_copy(size_t op, std::vector<Segment>& out);
  void add_sum(size_t op, std::vector<Segment>& out);
  void add_notify(size_t op, size_t stream, std::vector<int64_t>& notifier, std::vector<Segment>& out);

  tide::Program table_;
  std::vector<uint32_t> readers_;
  std::vector<int64_t> lanes_;
  size_t n_lanes_ = 0;
  std::vector<std::vector<Segment>> streams_;
  std::vector<Copy> copies_;
  std::vector<Clear> clears_;
  std::vector<Signal> signals_;
  std::vector<SumKind> kinds_;
  std::vector<SumRun> sums_;
  std::vector<uint32_t> notified_;  // per local counter, in one call
  mutable std::atomic<uint64_t> fits_{0};
  mutable std::mutex plan_lock_;
  std::vector<std::shared_ptr<const SumPlan>> plans_;  // by kind
};

// One use of a program: addresses, counters, and what they had come to before it.
class Call {
 public:
  Call(std::shared_ptr<Control> control, std::shared_ptr<const Program> program, std::vector<uint64_t> bases,
       std::vector<uint32_t> counters, uint32_t tag, float divisor);

  // Gives one stream of the program to the device; returns at once.
  void enqueue(size_t stream, uint64_t cuda_stream) const;
  // Gives streams to the device, in order, each to the CUDA stream of its lane; returns at once. A lane whose CUDA
  // stream is 0 is left out, to be given another time.
  void enqueue_lanes(const std::vector<uint64_t>& cuda_streams) const;
  uint32_t seq() const { return seq_; }
  size_t n_streams() const { return program_->n_streams(); }

 private:
  DevicePtr at(const Operand& o) const { return bases_[static_cast<size_t>(o.base)] + static_cast<uint64_t>(o.offset); }
  void enqueue_copies(const Segment& segment, StreamHandle stream) const;
  void enqueue_signals(const Segment& segment, StreamHandle stream) const;
  void append_notify(const Signal& s, std::vector<MemOp>& ops) const;

  std::shared_ptr<Control> control_;
  std::shared_ptr<const Program> program_;
  std::vector<std::shared_ptr<const SumPlan>> plans_;  // by kind
  std::vector<uint64_t> bases_;
  std::vector<uint32_t> counters_;
  std::vector<uint32_t> await_base_;  // per await slot
  std::vector<uint32_t> own_base_;    // per local counter: own total before this call
  uint32_t seq_ = 0, tag_ = 0;
  Scaling scaling_;
};

}  // namespace tide::cuda
