// Cutting a program's streams into segments. Enqueueing is in call.cpp.
#include "program.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

namespace tide::cuda {
namespace {

[[noreturn]] void refuse(size_t op, const std::string& why) {
  throw std::invalid_argument("op " + std::to_string(op) + ": " + why);
}

// Opens a segment of `kind` unless the last one can go on; `at` is where the next item of the kind goes.
Segment& continued(std::vector<Segment>& out, Segment::Kind kind, size_t at) {
  if (out.empty() || out.back().kind != kind) out.push_back({kind, at, 0});
  ++out.back().count;
  return out.back();
}

}  // namespace

Program::Program(const tide::Program::Parts& parts, const std::vector<int64_t>& readers, std::vector<int64_t> lanes)
    : table_(parts), lanes_(std::move(lanes)), notified_(table_.n_counters(), 0) {
  const size_t n = table_.streams().size();
  if (lanes_.empty())
    for (size_t s = 0; s < n; ++s) lanes_.push_back(static_cast<int64_t>(s));
  if (lanes_.size() != n)
    throw std::invalid_argument("lanes has " + std::to_string(lanes_.size()) + " entries; the program has " +
                                std::to_string(n) + " streams");
  for (const int64_t lane : lanes_) {
    if (lane < 0 || lane >= static_cast<int64_t>(n))
      throw std::invalid_argument("lanes holds " + std::to_string(lane) + "; allowed: 0 to " + std::to_string(n - 1));
    n_lanes_ = std::max(n_lanes_, static_cast<size_t>(lane) + 1);
  }
  for (const int64_t r : readers) {
    if (r < 0 || r >= kMaxRanks)
      throw std::invalid_argument("readers holds " + std::to_string(r) + "; allowed: ranks from 0 to " +
                                  std::to_string(kMaxRanks - 1));
    readers_.push_back(static_cast<uint32_t>(r));
  }
  std::vector<int64_t> notifier(table_.n_counters(), -1);
  for (size_t s = 0; s < table_.streams().size(); ++s) compile_stream(s, notifier);
}

void Program::compile_stream(size_t stream, std::vector<int64_t>& notifier) {
  const tide::Stream range = table_.streams()[stream];
  std::vector<Segment> out;
  for (size_t i = range.first; i < range.first + range.count; ++i) {
    const Op& op = table_.ops()[i];
    switch (op[0]) {
      case kCopy:
        add_copy(i, out);
        break;
      case kSum:
        if (op[3] != 0) add_sum(i, out);
        break;
      case kZero:
        if (op[3] == 0) break;
        continued(out, Segment::kClear, clears_.size());
        clears_.push_back({{op[1], op[2]}, static_cast<size_t>(op[3])});
        break;
      case kNotify:
        add_notify(i, lane_of(stream), notifier, out);
        break;
      default: {  // kAwait: the decoder admits no other opcode
        Segment& segment = continued(out, Segment::kSignals, signals_.size());
        const bool taken = op[4] != 0;
        segment.waits = segment.waits || !taken;
        signals_.push_back({taken ? Signal::kTaken : Signal::kWait, static_cast<uint32_t>(op[1]),
                            table_.await_slot_of(i), 0, static_cast<uint32_t>(op[3])});
      }
    }
  }
  streams_.push_back(std::move(out));
}

void Program::add_copy(size_t index, std::vector<Segment>& out) {
  const Op& op = table_.ops()[index];
  if (op[9] != op[10]) refuse(index, "a copy on the device moves bytes; casting is done by a kernel beforehand");
  const auto rows = static_cast<size_t>(op[5]);
  const size_t row_bytes = static_cast<size_t>(op[6]) * static_cast<size_t>(dtype_bytes(op[9]));
  if (rows == 0 || row_bytes == 0) return;
  CopyShape shape{row_bytes, rows, static_cast<size_t>(op[7]), static_cast<size_t>(op[8])};
  if (rows > 1 && shape.src_pitch == row_bytes && shape.dst_pitch == row_bytes) shape = {rows * row_bytes, 1, 0, 0};
  if (shape.rows > 1 && (shape.src_pitch < row_bytes || shape.dst_pitch < row_bytes))
    refuse(index, "pitches of " + std::to_string(shape.src_pitch) + " and " + std::to_string(shape.dst_pitch) +
                      " bytes; a copy on the device needs at least the row's " + std::to_string(row_bytes));
  continued(out, Segment::kCopies, copies_.size());
  copies_.push_back({{op[1], op[2]}, {op[3], op[4]}, shape});
}

// Notifications store totals, so those of one counter must happen in the order of the table.
void Program::add_notify(size_t index, size_t lane, std::vector<int64_t>& notifier, std::vector<Segment>& out) {
  const Op& op = table_.ops()[index];
  const auto counter = static_cast<size_t>(op[1]);
  if (notifier[counter] >= 0 && notifier[counter] != static_cast<int64_t>(lane))
    refuse(index, "counter " + std::to_string(counter) + " is notified by stream " + std::to_string(notifier[counter]) +
                      " too; on the device a counter is notified by one stream of a program");
  notifier[counter] = static_cast<int64_t>(lane);
  notified_[counter] += static_cast<uint32_t>(op[2]);
  continued(out, Segment::kSignals, signals_.size());
  signals_.push_back({Signal::kNotify, static_cast<uint32_t>(counter), 0, op[3], notified_[counter]});
}

// The tiles of a run are added up side by side: what is added to the same place twice makes two runs.
void Program::add_sum(size_t index, std::vector<Segment>& out) {
  const Op& op = table_.ops()[index];
  const SumKind kind = SumKind::of(op);
  const auto number = static_cast<size_t>(std::find(kinds_.begin(), kinds_.end(), kind) - kinds_.begin());
  if (number == kinds_.size()) kinds_.push_back(kind);
  const auto end = [](const Op& o) { return o[2] + o[3] * dtype_bytes(o[5]); };
  const auto apart = [&](size_t other) {
    const Op& o = table_.ops()[other];
    return !kind.accumulate || o[1] != op[1] || end(o) <= op[2] || end(op) <= o[2];
  };
  if (out.empty() || out.back().kind != Segment::kSums || sums_.back().kind != number ||
      !std::all_of(sums_.back().ops.begin(), sums_.back().ops.end(), apart)) {
    out.push_back({Segment::kSums, sums_.size(), 1});
    sums_.push_back({number, {}});
  }
  sums_.back().ops.push_back(index);
}

void Program::set_sum_kernel(const SumKernel& kernel, size_t kind, Device& device) {
  auto plan = std::make_shared<const SumPlan>(table_, sums_, kind, kernel, device);
  std::lock_guard<std::mutex> hold(plan_lock_);
  plans_.resize(kinds_.size());
  plans_[kind].swap(plan);
}

std::vector<std::shared_ptr<const SumPlan>> Program::sum_plans() const {
  std::lock_guard<std::mutex> hold(plan_lock_);
  return plans_;
}

void Program::check_fits(const Control& control) const {
  if (fits_.load(std::memory_order_acquire) == control.id()) return;
  if (table_.highest_writer() >= static_cast<int64_t>(control.ranks()))
    throw std::invalid_argument("the program names writer rank " + std::to_string(table_.highest_writer()) +
                                "; the control has " + std::to_string(control.ranks()) + " ranks");
  for (const auto& slot : table_.await_slots()) {
    const auto told = [&](const Signal& s) {
      return s.kind == Signal::kNotify && s.counter == slot.counter && s.reader == static_cast<int64_t>(control.rank());
    };
    if (slot.writer == control.rank() && std::none_of(signals_.begin(), signals_.end(), told))
      throw std::invalid_argument("the program awaits counter " + std::to_string(slot.counter) +
                                  " of this rank itself, which it does not notify");
  }
  const auto reachable = [&](int64_t reader) {
    if (reader >= static_cast<int64_t>(control.ranks()))
      throw std::invalid_argument("the program notifies rank " + std::to_string(reader) + "; the control has " +
                                  std::to_string(control.ranks()) + " ranks");
    if (!control.reaches(reader))
      throw std::invalid_argument("the program notifies rank " + std::to_string(reader) +
                                  ", whose counters are not mapped here");
  };
  bool everyone = false;
  for (const Signal& s : signals_) {
    if (s.kind != Signal::kNotify) continue;
    if (s.reader >= 0) reachable(s.reader);
    else everyone = true;
  }
  for (const uint32_t r : readers_) reachable(r);
  for (uint32_t r = 0; everyone && readers_.empty() && r < control.ranks(); ++r) reachable(r);
  std::vector<uint32_t> advanced(table_.n_counters(), 0);
  for (const Advance& a : table_.advance())
    if (a.writer == control.rank()) advanced[a.counter] += a.amount;
  for (size_t c = 0; c < advanced.size(); ++c)
    if (advanced[c] != notified_[c])
      throw std::invalid_argument("the program notifies counter " + std::to_string(c) + " by " +
                                  std::to_string(notified_[c]) + " in all, but its advance for rank " +
                                  std::to_string(control.rank()) + " is " + std::to_string(advanced[c]));
  fits_.store(control.id(), std::memory_order_release);
}

}  // namespace tide::cuda
