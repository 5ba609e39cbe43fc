// Counter cells in device memory, and the host's record of the waits given to the device.
//
// Cell (counter, writer) of a rank lies at (counter * ranks + writer) * 16 bytes of its control mapping. A
// writer stores its new total into the cell of every reader; a reader waits on its own memory only. The
// values are totals, known to the host when a call begins, so the device stores and compares plain numbers.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "arena.h"
#include "memory.h"
#include "stream.h"

namespace tide::cuda {

class Program;

constexpr uint64_t kCellBytes = 16;
constexpr uint64_t kRecords = 4096;

struct Wait {
  uint32_t counter;  // physical
  uint32_t writer;
  uint32_t expected;
};

struct OverdueWait {
  uint64_t k;
  uint32_t seq, tag;
  Wait wait;
  int64_t seen;  // -1 if it could not be read in time
  double blocked_s;
};

class Control {
 public:
  static uint64_t control_bytes(int64_t ranks, int64_t counters);
  // Zeroes the own cells. Peers may be null where nothing is ever sent; the own entry is not used.
  Control(int64_t device, int64_t ranks, int64_t rank, int64_t counters, std::shared_ptr<Mapping> own,
          std::vector<std::shared_ptr<Mapping>> peers);
  // With cells in host memory instead, which threads of this process store into (deliver()), without the driver.
  Control(int64_t device, int64_t ranks, int64_t rank, int64_t counters);
  ~Control();
  Control(const Control&) = delete;
  Control& operator=(const Control&) = delete;

  Device& device() const { return device_; }
  uint32_t ranks() const { return ranks_; }
  uint32_t rank() const { return rank_; }
  uint32_t counters() const { return counters_; }
  // Host memory that the device reaches: records, copies of the cells, and the cells themselves where they are there.
  size_t pinned_bytes() const {
    return records_.bytes() + snapshot_.bytes() + image_.bytes() + (cells_ != nullptr ? cells_->bytes() : 0);
  }
  uint64_t id() const { return id_; }  // differs between all controls of the process
  bool reaches(int64_t reader) const { return reader == rank_ || peers_[static_cast<size_t>(reader)] != nullptr; }

  // Address of cell (counter, writer) in the reader's memory.
  DevicePtr cell(uint32_t reader, uint32_t counter, uint32_t writer) const {
    return (reader == rank_ ? own_address_ : peers_[reader]->address()) + place(counter, writer);
  }

  // Of a control whose cells are in host memory: the writer's cell has come to `total`. Nothing once it is released.
  void deliver(int64_t counter, int64_t writer, uint32_t total);
  // Whether it has; waits for it for so long.
  bool delivered(int64_t counter, int64_t writer, uint32_t total, double seconds) const;

  // Same books as the CPU arena's: totals of every (counter, writer) over all calls begun.
  Arena::Ledger& ledger() { return ledger_; }

  // Room for the record of one bracketed run of waits: the device stores 2k + 1 into it when it comes to the
  // waits, 2k + 2 when they are through. Blocks for patience_ns() at most if 4096 runs are under way.
  uint64_t reserve(uint32_t seq, uint32_t tag, const std::vector<Wait>& waits);
  void cancel(uint64_t k);  // the device was never told
  DevicePtr record_address(uint64_t k) const { return records_.device_address() + (k % kRecords) * 4; }
  static uint32_t begun_value(uint64_t k) { return static_cast<uint32_t>(2 * k + 1); }
  static uint32_t done_value(uint64_t k) { return static_cast<uint32_t>(2 * k + 2); }

  size_t outstanding();
  std::vector<OverdueWait> overdue(double seconds);

  // Fail-stop: lets every wait pass. Own cells become 2**30 more than the totals, which is ahead of whatever was
  // or will be awaited and cannot be mistaken for behind; calls enqueued from now on do not wait at all. A peer
  // that is alive may still store a smaller total over it: repeat until outstanding() is 0. False if the device
  // did not take it within about three seconds.
  bool release();
  bool released() const { return released_.load(std::memory_order_acquire); }

  // Lets every wait pass once one has blocked its stream for so long, from a thread that needs nothing of Python: a
  // caller that holds the interpreter's lock while the driver has no room for it would stop any other watcher.
  void release_after(double seconds);

 private:
  struct Record {
    bool busy = false;
    uint64_t k = 0;
    uint32_t seq = 0, tag = 0;
    int64_t begun_ns = 0;  // when overdue() first saw it begun
    std::vector<Wait> waits;
  };

  Control(int64_t device, int64_t ranks, int64_t rank, int64_t counters, std::unique_ptr<HostPage> cells,
          std::shared_ptr<Mapping> own, std::vector<std::shared_ptr<Mapping>> peers);
  uint64_t place(uint32_t counter, uint32_t writer) const {
    return (uint64_t{counter} * ranks_ + writer) * kCellBytes;
  }
  uint32_t* host_cell(int64_t counter, int64_t writer) const;
  void zero_own();
  void watch(double seconds);
  void stop_watching();
  uint32_t record_value(uint64_t k) const {
    return __atomic_load_n(records_.words() + k % kRecords, __ATOMIC_ACQUIRE);
  }
  void retire(bool everything);
  bool read_cells();  // into snapshot_
  bool write_cells(int64_t limit_ns);

  Device& device_;
  uint32_t ranks_, rank_, counters_;
  uint64_t id_, bytes_;
  std::unique_ptr<HostPage> cells_;  // where the own cells are in host memory
  std::shared_ptr<Mapping> own_;     // else
  DevicePtr own_address_ = 0;
  std::vector<std::shared_ptr<Mapping>> peers_;
  Arena::Ledger ledger_;
  std::atomic<bool> released_{false};

  std::mutex records_lock_;
  std::vector<Record> table_;      // kRecords
  std::deque<uint64_t> under_way_;
  uint64_t next_k_ = 0;

  // Reading and releasing must work while everything else is blocked: streams and host pages of their own.
  std::mutex side_lock_;
  HostPage records_, snapshot_, image_;
  Stream reader_;
  Event read_done_;
  bool read_pending_ = false;
  std::vector<std::unique_ptr<Stream>> release_streams_;
  bool image_pending_ = false;

  std::mutex watcher_lock_;
  std::condition_variable watcher_wake_;
  bool closing_ = false;
  int watched_by_ = 0;  // process
  std::thread watcher_;
};

}  // namespace tide::cuda
