// The shared-memory arena: an anonymous memory file shared by the ranks of one host.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "control.h"
#include "peer.h"

namespace tide {

struct AbortInfo {
  int rank;
  int code;
  std::string message;
};

size_t page_bytes();

class Arena {
 public:
  // A new memory file with its control region; `rank` is this process's place among `ranks`.
  static std::shared_ptr<Arena> create(int64_t ranks, int64_t rank, int64_t counters);
  // The same file seen from another rank. `fd` is duplicated; whatever does not fit is refused.
  static std::shared_ptr<Arena> attach(int fd, int64_t ranks, int64_t rank, int64_t counters);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  int fd() const { return fd_; }
  uint32_t ranks() const { return ranks_; }
  uint32_t rank() const { return rank_; }
  uint32_t counters() const { return counters_; }
  uint64_t control_bytes() const { return control_bytes_; }
  uint64_t bytes() const;            // file size
  uint64_t allocated_bytes() const;  // memory held by the file

  // Gets memory for [offset, offset + bytes), widened to whole pages, or throws OsError: EFBIG beyond
  // RLIMIT_FSIZE, ENOMEM beyond available_bytes(), else what the kernel said. Repeating it is free.
  void reserve(int64_t offset, int64_t bytes);
  // Gives the whole pages within the range back to the system. The file keeps its length, so a mapping
  // that is left over reads zeros instead of faulting.
  void release(int64_t offset, int64_t bytes);
  // Throws unless [offset, offset + bytes) is page aligned at its start and lies within the file.
  void check_mappable(int64_t offset, uint64_t bytes) const;

  void watch(int64_t rank, int64_t pid);
  // For a rank of another host, whom no pid can be watched of: what it has not done by now, it never will.
  void lose(int64_t rank);
  bool peer_dead(uint32_t rank) const;

  // True if this was the first; `rank` is the one that gives up.
  bool abort(int64_t code, std::string_view message, int64_t rank);
  bool is_aborted() const { return header_->abort_claim.load(std::memory_order_acquire) != 0; }
  std::optional<AbortInfo> aborted() const;

  Cell& cell(uint32_t counter, uint32_t writer) const { return cells_[size_t{counter} * ranks_ + writer]; }
  uint64_t tag_at(uint32_t writer, uint32_t seq) const {
    return rings_[writer].entries[seq % kTagSlots].load(std::memory_order_acquire);
  }
  uint64_t latest_tag(uint32_t writer) const;
  // For whoever brings the notifications of a rank of another host, one thread for each such rank.
  void publish_tag_of(uint32_t writer, uint32_t seq, uint32_t tag);
  uint64_t spin_ns() const { return spin_ns_; }

  // State of this rank alone, changed once per call under the lock: how far every (counter, writer) has
  // come over all earlier calls, how many calls there were, and a scratch mark per counter.
  struct Ledger {
    std::mutex lock;
    std::vector<uint32_t> totals;
    std::vector<uint64_t> marks;
    uint64_t mark = 0;
    uint32_t seq = 0;
  };
  Ledger& ledger() { return ledger_; }
  void publish_tag(uint32_t seq, uint32_t tag) {
    rings_[rank_].entries[seq % kTagSlots].store(tag_entry(seq, tag), std::memory_order_release);
  }

 private:
  Arena(int fd, uint32_t ranks, uint32_t rank, uint32_t counters, uint64_t control_bytes);
  void map_control();
  uint64_t missing_bytes(uint64_t begin, uint64_t end) const;

  int fd_;
  uint32_t ranks_, rank_, counters_;
  uint64_t control_bytes_;
  uint64_t spin_ns_ = 0;
  Header* header_ = nullptr;
  TagRing* rings_ = nullptr;
  Cell* cells_ = nullptr;
  Ledger ledger_;
  mutable std::mutex peers_lock_;
  std::vector<Peer> peers_;
  std::vector<bool> lost_;
};

}  // namespace tide
