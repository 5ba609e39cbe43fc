#include "control.h"

#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cmath>
#include <stdexcept>
#include <utility>

#include "clock.h"
#include "counter.h"
#include "error.h"
#include "host_memory.h"

namespace tide::cuda {
namespace {

constexpr int64_t kSecond = 1'000'000'000;
constexpr int64_t kZeroNs = 30 * kSecond;
constexpr int64_t kReadNs = kSecond;
constexpr int64_t kReleaseTryNs = kSecond / 3;
constexpr size_t kReleaseTries = 8;
constexpr uint32_t kAhead = uint32_t{1} << 30;

uint32_t in_range(const char* name, int64_t value, int64_t low, int64_t high) {
  if (value < low || value > high)
    throw std::invalid_argument(std::string(name) + " is " + std::to_string(value) + "; allowed: " +
                                std::to_string(low) + " to " + std::to_string(high));
  return static_cast<uint32_t>(value);
}

std::unique_ptr<HostPage> host_cells(int64_t device, uint64_t bytes) {
  return std::make_unique<HostPage>(Device::get(device), bytes);
}

uint64_t fresh_id() {
  static std::atomic<uint64_t> last{0};
  return ++last;
}

}  // namespace

uint64_t Control::control_bytes(int64_t ranks, int64_t counters) {
  return uint64_t{in_range("ranks", ranks, 1, kMaxRanks)} * in_range("counters", counters, 1, kMaxCounters) *
         kCellBytes;
}

Control::Control(int64_t device, int64_t ranks, int64_t rank, int64_t counters, std::shared_ptr<Mapping> own,
                 std::vector<std::shared_ptr<Mapping>> peers)
    : Control(device, ranks, rank, counters, nullptr, std::move(own), std::move(peers)) {}

Control::Control(int64_t device, int64_t ranks, int64_t rank, int64_t counters)
    : Control(device, ranks, rank, counters, host_cells(device, control_bytes(ranks, counters)), nullptr,
              std::vector<std::shared_ptr<Mapping>>(in_range("ranks", ranks, 1, kMaxRanks))) {}

Control::Control(int64_t device, int64_t ranks, int64_t rank, int64_t counters, std::unique_ptr<HostPage> cells,
                 std::shared_ptr<Mapping> own, std::vector<std::shared_ptr<Mapping>> peers)
    : device_(Device::get(device)), ranks_(in_range("ranks", ranks, 1, kMaxRanks)),
      rank_(in_range("rank", rank, 0, ranks - 1)), counters_(in_range("counters", counters, 1, kMaxCounters)),
      id_(fresh_id()), bytes_(control_bytes(ranks, counters)), cells_(std::move(cells)), own_(std::move(own)),
      own_address_(cells_ != nullptr ? cells_->device_address() : own_->address()), peers_(std::move(peers)),
      table_(kRecords), records_(device_, kRecords * 4), snapshot_(device_, bytes_), image_(device_, bytes_),
      reader_(device, kMostUrgent), read_done_(device_) {
  if (peers_.size() != ranks_)
    throw std::invalid_argument("peers has " + std::to_string(peers_.size()) + " entries; there are " +
                                std::to_string(ranks_) + " ranks");
  const auto fits = [&](const Mapping& m, const std::string& whose) {
    if (m.device() != device_.ordinal())
      throw std::invalid_argument(whose + " mapping is for device " + std::to_string(m.device()) + ", not " +
                                  std::to_string(device));
    if (m.bytes() < bytes_)
      throw std::invalid_argument(whose + " mapping has " + std::to_string(m.bytes()) + " bytes; " +
                                  std::to_string(bytes_) + " are needed");
  };
  if (own_ != nullptr) fits(*own_, "the own");
  for (size_t r = 0; r < peers_.size(); ++r)
    if (peers_[r] != nullptr) fits(*peers_[r], "rank " + std::to_string(r) + "'s");
  ledger_.totals.assign(size_t{counters_} * ranks_, 0);
  ledger_.marks.assign(counters_, 0);
  // Made now: making one may wait for the device.
  for (const int64_t priority : {kMostUrgent, int64_t{0}})
    release_streams_.push_back(std::make_unique<Stream>(device, priority));
  if (cells_ == nullptr) zero_own();  // a new page of the host's is zero
}

Control::~Control() {
  stop_watching();
  std::lock_guard<std::mutex> hold(records_lock_);
  retire(true);
  if (!under_way_.empty()) records_.keep_for_good();
  if (!under_way_.empty() && cells_ != nullptr) cells_->keep_for_good();
  try {
    if (read_pending_ && !read_done_.done()) snapshot_.keep_for_good();
  } catch (const std::exception&) {
    snapshot_.keep_for_good();
  }
  if (image_pending_) image_.keep_for_good();
}

void Control::zero_own() {
  const Current current(device_);
  check(api().MemsetD8Async(own_address_, 0, bytes_, reader_.handle()), "cuMemsetD8Async");
  read_done_.record(reader_.handle());
  if (!read_done_.wait(now_ns() + kZeroNs))
    throw OsError(ETIMEDOUT, "device " + std::to_string(device_.ordinal()) + " did not zero the counters within " +
                                 std::to_string(kZeroNs / kSecond) + " s");
}

// Frees the records whose waits are through: from the front while there are any, or all of them.
void Control::retire(bool everything) {
  const auto through = [this](uint64_t k) {
    if (record_value(k) != done_value(k)) return false;
    table_[k % kRecords].busy = false;
    return true;
  };
  while (!under_way_.empty() && through(under_way_.front())) under_way_.pop_front();
  if (!everything) return;
  std::deque<uint64_t> left;
  for (const uint64_t k : under_way_)
    if (!through(k)) left.push_back(k);
  under_way_ = std::move(left);
}

uint64_t Control::reserve(uint32_t seq, uint32_t tag, const std::vector<Wait>& waits) {
  const int64_t deadline = now_ns() + patience_ns();
  for (;;) {
    {
      std::lock_guard<std::mutex> hold(records_lock_);
      retire(under_way_.size() >= kRecords);
      if (under_way_.size() < kRecords) {
        // An entry may be held by a stream that lags behind the others: numbers that fall on it are left out.
        while (table_[next_k_ % kRecords].busy) ++next_k_;
        const uint64_t k = next_k_++;
        Record& record = table_[k % kRecords];
        record.busy = true;
        record.k = k;
        record.seq = seq;
        record.tag = tag;
        record.begun_ns = 0;
        record.waits.assign(waits.begin(), waits.end());
        under_way_.push_back(k);
        return k;
      }
    }
    if (now_ns() >= deadline)
      throw OsError(ETIMEDOUT, std::to_string(kRecords) + " runs of waits are under way on the device and none ended "
                                                          "within " + std::to_string(patience_ns() / kSecond) + " s");
    sleep_ns(200'000);
  }
}

void Control::cancel(uint64_t k) {
  std::lock_guard<std::mutex> hold(records_lock_);
  table_[k % kRecords].busy = false;
  for (auto it = under_way_.begin(); it != under_way_.end(); ++it) {
    if (*it != k) continue;
    under_way_.erase(it);
    return;
  }
}

size_t Control::outstanding() {
  std::lock_guard<std::mutex> hold(records_lock_);
  retire(true);
  return under_way_.size();
}

std::vector<OverdueWait> Control::overdue(double seconds) {
  if (!std::isfinite(seconds) || seconds < 0 || seconds > 1e9)
    throw std::invalid_argument("seconds must be between 0 and 1e9; got " + std::to_string(seconds));
  const auto limit = static_cast<int64_t>(seconds * 1e9);
  std::vector<OverdueWait> found;
  {
    std::lock_guard<std::mutex> hold(records_lock_);
    retire(true);
    const int64_t now = now_ns();
    for (const uint64_t k : under_way_) {
      Record& record = table_[k % kRecords];
      if (record_value(k) != begun_value(k)) continue;
      if (record.begun_ns == 0) record.begun_ns = now;
      const int64_t blocked = now - record.begun_ns;
      if (blocked < limit) continue;
      for (const Wait& w : record.waits)
        found.push_back({k, record.seq, record.tag, w, -1, static_cast<double>(blocked) * 1e-9});
    }
  }
  if (found.empty()) return found;
  std::lock_guard<std::mutex> hold(side_lock_);
  if (!read_cells()) return found;
  std::vector<OverdueWait> blocked;
  for (OverdueWait& w : found) {
    const uint64_t at = place(w.wait.counter, w.wait.writer) / 4;
    const uint32_t seen =
        cells_ != nullptr ? __atomic_load_n(cells_->words() + at, __ATOMIC_ACQUIRE) : snapshot_.words()[at];
    if (reached(seen, w.wait.expected)) continue;  // another wait of the same run holds it up
    w.seen = seen;
    blocked.push_back(w);
  }
  return blocked;
}

uint32_t* Control::host_cell(int64_t counter, int64_t writer) const {
  if (cells_ == nullptr) throw std::invalid_argument("the cells of this control are not in host memory");
  return cells_->words() + place(in_range("counter", counter, 0, int64_t{counters_} - 1),
                                 in_range("writer", writer, 0, int64_t{ranks_} - 1)) / 4;
}

void Control::deliver(int64_t counter, int64_t writer, uint32_t total) {
  uint32_t* const cell = host_cell(counter, writer);
  std::lock_guard<std::mutex> hold(side_lock_);
  if (!released()) __atomic_store_n(cell, total, __ATOMIC_RELEASE);
}

bool Control::delivered(int64_t counter, int64_t writer, uint32_t total, double seconds) const {
  return word_comes_to(host_cell(counter, writer), total, seconds);
}

bool Control::read_cells() {
  if (cells_ != nullptr) return true;  // they are looked at where they are
  const Current current(device_);
  if (read_pending_ && !read_done_.done()) return false;  // an earlier copy hangs and owns the page
  read_pending_ = true;
  check(api().MemcpyDtoHAsync(snapshot_.words(), own_address_, bytes_, reader_.handle()), "cuMemcpyDtoHAsync");
  read_done_.record(reader_.handle());
  if (!read_done_.wait(now_ns() + kReadNs)) return false;
  read_pending_ = false;
  return true;
}

bool Control::release() {
  std::lock_guard<std::mutex> hold(side_lock_);
  released_.store(true, std::memory_order_release);
  {
    std::lock_guard<std::mutex> hold_ledger(ledger_.lock);
    for (size_t i = 0; i < ledger_.totals.size(); ++i)
      image_.words()[i * (kCellBytes / 4)] = ledger_.totals[i] + kAhead;
  }
  if (cells_ != nullptr) {
    for (size_t i = 0; i < bytes_ / 4; ++i)
      __atomic_store_n(cells_->words() + i, image_.words()[i], __ATOMIC_RELEASE);
    return true;
  }
  image_pending_ = true;
  // Streams share a limited number of hardware queues, and a blocked wait blocks its queue: if one stream of
  // ours does not come through, another may.
  for (size_t i = 0; i < kReleaseTries; ++i) {
    if (i == release_streams_.size())
      release_streams_.push_back(std::make_unique<Stream>(device_.ordinal(), i % 2 == 0 ? kMostUrgent : 0));
    const Current current(device_);
    const StreamHandle stream = release_streams_[i]->handle();
    check(api().MemcpyHtoDAsync(own_address_, image_.words(), bytes_, stream), "cuMemcpyHtoDAsync");
    Event done(device_);
    done.record(stream);
    if (!done.wait(now_ns() + kReleaseTryNs)) continue;
    image_pending_ = i > 0;
    return true;
  }
  return false;
}

void Control::release_after(double seconds) {
  if (!std::isfinite(seconds) || seconds < 0 || seconds > 1e9)
    throw std::invalid_argument("seconds must be between 0 and 1e9; got " + std::to_string(seconds));
  std::lock_guard<std::mutex> hold(watcher_lock_);
  if (watcher_.joinable()) throw std::invalid_argument("release_after was called before");
  watched_by_ = ::getpid();
  watcher_ = std::thread([this, seconds] { watch(seconds); });
}

void Control::stop_watching() {
  if (!watcher_.joinable()) return;
  if (watched_by_ != ::getpid()) {  // a forked child has no such thread
    new std::thread(std::move(watcher_));
    return;
  }
  {
    std::lock_guard<std::mutex> hold(watcher_lock_);
    closing_ = true;
  }
  watcher_wake_.notify_all();
  watcher_.join();
}

void Control::watch(double seconds) {
  std::unique_lock<std::mutex> hold(watcher_lock_);
  while (!watcher_wake_.wait_for(hold, std::chrono::milliseconds(500), [this] { return closing_; })) {
    hold.unlock();
    try {
      // What is let go may be overwritten by a peer that goes on: again and again, then.
      if (released() ? outstanding() != 0 : !overdue(seconds).empty()) (void)release();
    } catch (const std::exception&) {
      // The device fails, or goes down with the process: whoever calls it next is told.
    }
    hold.lock();
  }
}

}  // namespace tide::cuda
