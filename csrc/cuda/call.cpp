// Beginning a call, and giving its streams to the device.
#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "program.h"

namespace tide::cuda {
namespace {

// The driver takes fewer than 256 stream memory operations at once.
constexpr size_t kMaxBatch = 250;

void expect(const char* name, size_t given, size_t wanted) {
  if (given != wanted)
    throw std::invalid_argument(std::string(name) + " has " + std::to_string(given) + " entries; the program has " +
                                std::to_string(wanted));
}

MemOp mem_op(int operation, DevicePtr address, uint32_t value, unsigned flags) {
  MemOp op{};
  op.operation = operation;
  op.address = address;
  op.value64 = value;
  op.flags = flags;
  return op;
}

// Scratch space, kept from call to call.
struct Scratch {
  std::vector<PlacedCopy> copies;
  std::vector<MemOp> ops;
  std::vector<Wait> waits;
};
Scratch& scratch() {
  thread_local Scratch s;
  return s;
}

}  // namespace

Call::Call(std::shared_ptr<Control> control, std::shared_ptr<const Program> program, std::vector<uint64_t> bases,
           std::vector<uint32_t> counters, uint32_t tag, float divisor)
    : control_(std::move(control)), program_(std::move(program)), plans_(program_->sum_plans()),
      bases_(std::move(bases)), counters_(std::move(counters)), tag_(tag) {
  const tide::Program& p = program_->table();
  expect("bases", bases_.size(), p.n_bases());
  expect("counters", counters_.size(), p.n_counters());
  program_->check_fits(*control_);
  scaling_ = Scaling::by(divisor);
  plans_.resize(program_->sum_kinds().size());
  for (size_t kind = 0; kind < plans_.size(); ++kind) {
    if (plans_[kind] == nullptr)
      throw std::invalid_argument("the program has sums of kind " + std::to_string(kind) +
                                  ": call set_sum_kernel first");
    if (&plans_[kind]->device() != &control_->device())
      throw std::invalid_argument("the sum kernel is for device " + std::to_string(plans_[kind]->device().ordinal()) +
                                  ", the control for device " + std::to_string(control_->device().ordinal()));
  }

  // Nothing is changed before everything is known to be right: a refused call must not shift the totals.
  Arena::Ledger& ledger = control_->ledger();
  std::lock_guard<std::mutex> hold(ledger.lock);
  ++ledger.mark;
  for (size_t i = 0; i < counters_.size(); ++i) {
    const uint32_t c = counters_[i];
    if (c >= control_->counters())
      throw std::invalid_argument("counters[" + std::to_string(i) + "] is " + std::to_string(c) +
                                  "; the control has " + std::to_string(control_->counters()));
    if (ledger.marks[c] == ledger.mark)
      throw std::invalid_argument("counters[" + std::to_string(i) + "] is " + std::to_string(c) +
                                  ", which occurs before: the counters of a call must differ");
    ledger.marks[c] = ledger.mark;
  }
  const size_t ranks = control_->ranks();
  await_base_.reserve(p.await_slots().size());
  for (const auto& s : p.await_slots())
    await_base_.push_back(ledger.totals[size_t{counters_[s.counter]} * ranks + s.writer]);
  own_base_.reserve(counters_.size());
  for (const uint32_t c : counters_) own_base_.push_back(ledger.totals[size_t{c} * ranks + control_->rank()]);
  for (const Advance& a : p.advance()) ledger.totals[size_t{counters_[a.counter]} * ranks + a.writer] += a.amount;
  if (++ledger.seq == 0) ledger.seq = 1;
  seq_ = ledger.seq;
}

void Call::enqueue(size_t stream_index, uint64_t cuda_stream) const {
  const StreamHandle stream = own_stream(cuda_stream);
  const Current current(control_->device());
  for (const Segment& segment : program_->segments(stream_index)) {
    switch (segment.kind) {
      case Segment::kCopies:
        enqueue_copies(segment, stream);
        break;
      case Segment::kClear:
        for (size_t i = segment.first; i < segment.first + segment.count; ++i) {
          const Clear& c = program_->clears()[i];
          check(api().MemsetD8Async(at(c.dst), 0, c.bytes, stream), "cuMemsetD8Async");
        }
        break;
      case Segment::kSignals:
        enqueue_signals(segment, stream);
        break;
      case Segment::kSums:
        plans_[program_->sums()[segment.first].kind]->launch(segment.first, bases_, scaling_, stream);
        break;
    }
  }
}

void Call::enqueue_lanes(const std::vector<uint64_t>& cuda_streams) const {
  expect("cuda_streams", cuda_streams.size(), program_->n_lanes());
  for (size_t s = 0; s < program_->n_streams(); ++s) {
    const uint64_t stream = cuda_streams[program_->lane_of(s)];
    if (stream != 0) enqueue(s, stream);
  }
}

void Call::enqueue_copies(const Segment& segment, StreamHandle stream) const {
  std::vector<PlacedCopy>& copies = scratch().copies;
  copies.clear();
  for (size_t i = segment.first; i < segment.first + segment.count; ++i) {
    const Copy& c = program_->copies()[i];
    copies.push_back({at(c.src), at(c.dst), &c.shape});
  }
  enqueue_together(copies, stream);
}

void Call::append_notify(const Signal& s, std::vector<MemOp>& ops) const {
  const uint32_t total = own_base_[s.counter] + s.value, counter = counters_[s.counter], own = control_->rank();
  const auto store = [&](uint32_t reader) {
    ops.push_back(mem_op(kWriteValue32, control_->cell(reader, counter, own), total, kWriteDefault));
  };
  if (s.reader >= 0) return store(static_cast<uint32_t>(s.reader));
  for (const uint32_t r : program_->readers())
    if (r != own) store(r);
  if (!program_->readers().empty()) return;
  // Start with the next rank, not with rank 0: no rank is everybody's first.
  for (uint32_t step = 1; step < control_->ranks(); ++step) store((own + step) % control_->ranks());
}

void Call::enqueue_signals(const Segment& segment, StreamHandle stream) const {
  Scratch& scratch_space = scratch();
  std::vector<MemOp>& ops = scratch_space.ops;
  std::vector<Wait>& waits = scratch_space.waits;
  ops.clear();
  waits.clear();
  const bool waiting = segment.waits && !control_->released();
  if (waiting) ops.push_back({});  // "begun": filled in below, when the record is known
  for (size_t i = segment.first; i < segment.first + segment.count; ++i) {
    const Signal& s = program_->signals()[i];
    if (s.kind == Signal::kNotify) {
      append_notify(s, ops);
      continue;
    }
    const uint32_t writer = program_->table().await_slots()[s.slot].writer, counter = counters_[s.counter];
    const uint32_t expected = await_base_[s.slot] + s.value;
    if (s.kind == Signal::kTaken) {
      ops.push_back(mem_op(kWriteValue32, control_->cell(control_->rank(), counter, writer), expected, kWriteDefault));
      continue;
    }
    if (!waiting) continue;
    ops.push_back(mem_op(kWaitValue32, control_->cell(control_->rank(), counter, writer), expected, kWaitGeq));
    waits.push_back({counter, writer, expected});
  }
  uint64_t k = 0;
  if (waiting) {
    k = control_->reserve(seq_, tag_, waits);
    const DevicePtr record = control_->record_address(k);
    ops.front() = mem_op(kWriteValue32, record, Control::begun_value(k), kWriteDefault);
    ops.push_back(mem_op(kWriteValue32, record, Control::done_value(k), kWriteDefault));
  }
  for (size_t at = 0; at < ops.size(); at += kMaxBatch) {
    const auto count = static_cast<unsigned>(std::min(kMaxBatch, ops.size() - at));
    const Result r = api().StreamBatchMemOp(stream, count, ops.data() + at, 0);
    if (r != kSuccess && waiting && at == 0) control_->cancel(k);
    check(r, "cuStreamBatchMemOp");
  }
}

}  // namespace tide::cuda
