#include "host_memory.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

#include "bounds.h"
#include "clock.h"
#include "counter.h"
#include "stream.h"

namespace tide::cuda {
namespace {

constexpr int64_t kMostBytes = int64_t{1} << 46;
constexpr int64_t kMostMarks = 1 << 20;

size_t within(const char* name, int64_t value, int64_t low, int64_t high) {
  between(name, value, low, high);
  return static_cast<size_t>(value);
}

}  // namespace

bool word_comes_to(const uint32_t* word, uint32_t value, double seconds) {
  if (!std::isfinite(seconds) || seconds < 0 || seconds > 1e9)
    throw std::invalid_argument("seconds must be between 0 and 1e9; got " + std::to_string(seconds));
  const int64_t deadline = now_ns() + static_cast<int64_t>(seconds * 1e9);
  for (int64_t pause = 10'000;; pause = std::min<int64_t>(2 * pause, 500'000)) {
    if (reached(__atomic_load_n(word, __ATOMIC_ACQUIRE), value)) return true;
    if (now_ns() >= deadline) return false;
    sleep_ns(pause);
  }
}

HostMemory::HostMemory(int64_t device, int64_t bytes, int64_t marks)
    : device_(Device::get(device)), bytes_(bytes), n_marks_(marks),
      page_(device_, within("bytes", bytes, 1, kMostBytes)) {
  const size_t words = within("marks", marks, 0, kMostMarks);
  if (words > 0) marks_.emplace(device_, 4 * words);
}

HostMemory::~HostMemory() {
  bool through = false;
  try {
    through = settle_for_teardown(device_);
  } catch (const std::exception&) {
    // The driver is going down, and with it whatever might use this.
  }
  if (through) return;
  page_.keep_for_good();
  if (marks_) marks_->keep_for_good();
}

const uint8_t* HostMemory::at(int64_t offset, int64_t bytes) const {
  between("bytes", bytes, 0, bytes_);
  between("offset", offset, 0, bytes_ - bytes);
  return reinterpret_cast<const uint8_t*>(page_.words()) + offset;
}

void HostMemory::fetch(int64_t offset, uint64_t source, int64_t bytes, uint64_t stream) {
  auto* to = const_cast<uint8_t*>(at(offset, bytes));
  const StreamHandle on = own_stream(stream);
  const Current current(device_);
  check(api().MemcpyDtoHAsync(to, source, static_cast<size_t>(bytes), on), "cuMemcpyDtoHAsync");
}

void HostMemory::store(uint64_t target, int64_t offset, int64_t bytes, uint64_t stream) {
  const uint8_t* from = at(offset, bytes);
  const StreamHandle on = own_stream(stream);
  const Current current(device_);
  check(api().MemcpyHtoDAsync(target, from, static_cast<size_t>(bytes), on), "cuMemcpyHtoDAsync");
}

void HostMemory::mark(int64_t index, uint32_t value, uint64_t stream) {
  between("index", index, 0, n_marks_ - 1);
  MemOp op{};
  op.operation = kWriteValue32;
  op.address = marks_->device_address() + static_cast<uint64_t>(index) * 4;
  op.value64 = value;
  op.flags = kWriteDefault;
  const StreamHandle on = own_stream(stream);
  const Current current(device_);
  check(api().StreamBatchMemOp(on, 1, &op, 0), "cuStreamBatchMemOp");
}

bool HostMemory::marked(int64_t index, uint32_t value, double seconds) const {
  between("index", index, 0, n_marks_ - 1);
  return word_comes_to(marks_->words() + index, value, seconds);
}

}  // namespace tide::cuda
