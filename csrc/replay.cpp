// Running the ops of a call.
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

#include "program.h"

namespace tide {

Call::Call(std::shared_ptr<Arena> arena, std::shared_ptr<const Program> program, std::vector<uint64_t> bases,
           std::vector<uint32_t> counters, uint32_t tag, float divisor)
    : arena_(std::move(arena)), program_(std::move(program)), bases_(std::move(bases)),
      counters_(std::move(counters)), tag_(tag) {
  const Program& p = *program_;
  const auto expect = [](const char* name, size_t given, size_t wanted) {
    if (given != wanted)
      throw std::invalid_argument(std::string(name) + " has " + std::to_string(given) + " entries; the program has " +
                                  std::to_string(wanted));
  };
  expect("bases", bases_.size(), p.n_bases());
  expect("counters", counters_.size(), p.n_counters());
  if (p.highest_writer() >= static_cast<int64_t>(arena_->ranks()))
    throw std::invalid_argument("the program names writer rank " + std::to_string(p.highest_writer()) +
                                "; the arena has " + std::to_string(arena_->ranks()) + " ranks");
  scaling_ = Scaling::by(divisor);

  // Nothing is changed before everything is known to be right: a refused call must not shift the totals.
  Arena::Ledger& ledger = arena_->ledger();
  std::lock_guard<std::mutex> hold(ledger.lock);
  ++ledger.mark;
  for (size_t i = 0; i < counters_.size(); ++i) {
    const uint32_t c = counters_[i];
    if (c >= arena_->counters())
      throw std::invalid_argument("counters[" + std::to_string(i) + "] is " + std::to_string(c) + "; the arena has " +
                                  std::to_string(arena_->counters()));
    if (ledger.marks[c] == ledger.mark)
      throw std::invalid_argument("counters[" + std::to_string(i) + "] is " + std::to_string(c) +
                                  ", which occurs before: the counters of a call must differ");
    ledger.marks[c] = ledger.mark;
  }
  const size_t ranks = arena_->ranks();
  await_base_.reserve(p.await_slots().size());
  for (const Program::AwaitSlot& s : p.await_slots())
    await_base_.push_back(ledger.totals[size_t{counters_[s.counter]} * ranks + s.writer]);
  for (const Advance& a : p.advance()) ledger.totals[size_t{counters_[a.counter]} * ranks + a.writer] += a.amount;
  if (++ledger.seq == 0) ledger.seq = 1;  // zero means "never used" in the tag rings
  seq_ = ledger.seq;
  arena_->publish_tag(seq_, tag_);
}

void Call::copy(const Op& op) const {
  const unsigned char* src = at(op[1], op[2]);
  unsigned char* dst = at(op[3], op[4]);
  const auto rows = static_cast<size_t>(op[5]), elements = static_cast<size_t>(op[6]);
  const auto src_pitch = static_cast<size_t>(op[7]), dst_pitch = static_cast<size_t>(op[8]);
  if (rows == 0 || elements == 0) return;
  if (op[9] == op[10]) {
    const size_t row_bytes = elements * static_cast<size_t>(dtype_bytes(op[9]));
    if (rows == 1 || (src_pitch == row_bytes && dst_pitch == row_bytes)) {
      if (src != dst) std::memcpy(dst, src, rows * row_bytes);
      return;
    }
    for (size_t r = 0; r < rows; ++r) std::memcpy(dst + r * dst_pitch, src + r * src_pitch, row_bytes);
    return;
  }
  const Kernels& k = kernels();
  const auto convert = op[9] == kFp32 ? k.fp32_to_bf16 : k.bf16_to_fp32;
  for (size_t r = 0; r < rows; ++r) convert(dst + r * dst_pitch, src + r * src_pitch, elements);
}

void Call::sum(const Op& op, std::vector<const void*>& scratch) const {
  scratch.clear();
  const Source* sources = program_->sources().data() + op[7];
  for (int64_t i = 0; i < op[6]; ++i) scratch.push_back(at(sources[i].base, sources[i].offset));
  SumJob job{};
  job.dst = at(op[1], op[2]);
  job.sources = scratch.data();
  job.n_sources = scratch.size();
  job.elements = static_cast<size_t>(op[3]);
  job.src_bf16 = op[4] == kBf16;
  job.dst_bf16 = op[5] == kBf16;
  job.accumulate = (op[8] & kAccumulate) != 0;
  job.scale = (op[8] & kScaled) != 0 ? scaling_.scale : Scale::kNone;
  job.factor = scaling_.factor;
  kernels().sum(job);
}

Status Call::await_op(size_t index, const Op& op, int64_t deadline_ns, void (*poll_signals)(),
                      int64_t* waited_ns) const {
  Await a{};
  a.counter = counters_[static_cast<size_t>(op[1])];
  a.writer = static_cast<uint32_t>(op[2]);
  a.target = target(index, op);
  a.same_call = op[3] > 0;
  a.seq = seq_;
  a.tag = tag_;
  a.deadline_ns = deadline_ns;
  a.poll_signals = poll_signals;
  return await(*arena_, a, waited_ns);
}

void Call::describe_failure(size_t index, const Op& op, Outcome* outcome) const {
  const uint32_t counter = counters_[static_cast<size_t>(op[1])];
  const auto writer = static_cast<uint32_t>(op[2]);
  outcome->op = static_cast<int64_t>(index);
  outcome->writer = writer;
  outcome->counter = counter;
  outcome->expected = target(index, op);
  outcome->seen = arena_->cell(counter, writer).value.load(std::memory_order_acquire);
  uint64_t entry = arena_->tag_at(writer, seq_);
  if (static_cast<uint32_t>(entry >> 32) != seq_) entry = arena_->latest_tag(writer);
  if (entry == 0) return;  // it has not begun any call
  outcome->peer_seq = static_cast<int64_t>(entry >> 32);
  outcome->peer_tag = static_cast<int64_t>(static_cast<uint32_t>(entry));
}

Outcome Call::run(size_t stream, int64_t deadline_ns, void (*poll_signals)()) const {
  Outcome outcome;
  if (arena_->is_aborted()) {
    outcome.status = Status::kAborted;
    return outcome;
  }
  const Stream& s = program_->streams()[stream];
  std::vector<const void*> scratch;
  int64_t waited_ns = 0;
  for (size_t i = s.first; i < s.first + s.count && outcome.status == Status::kOk; ++i) {
    const Op& op = program_->ops()[i];
    switch (op[0]) {
      case kCopy:
        copy(op);
        break;
      case kSum:
        sum(op, scratch);
        break;
      case kZero:
        std::memset(at(op[1], op[2]), 0, static_cast<size_t>(op[3]));
        break;
      case kNotify:
        notify(*arena_, counters_[static_cast<size_t>(op[1])], static_cast<uint32_t>(op[2]));
        break;
      default:  // kAwait: the constructor admits no other opcode
        outcome.status = await_op(i, op, deadline_ns, poll_signals, &waited_ns);
        if (outcome.status != Status::kOk) describe_failure(i, op, &outcome);
    }
  }
  outcome.waited_s = static_cast<double>(waited_ns) * 1e-9;
  return outcome;
}

Outcome Call::run_all(int64_t deadline_ns, void (*poll_signals)()) const {
  Outcome outcome;
  double waited_s = 0;
  for (size_t i = 0; i < n_streams() && outcome.status == Status::kOk; ++i) {
    outcome = run(i, deadline_ns, poll_signals);
    waited_s += outcome.waited_s;
  }
  outcome.waited_s = waited_s;
  return outcome;
}

}  // namespace tide
