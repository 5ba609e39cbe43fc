// Host RMA: puts with signals to the ranks of a communicator, and waits for theirs, on CUDA streams.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "nccl_comm.h"
#include "stream.h"

namespace tide::nccl {

// A wait that its stream has reached and that is not over.
struct OverdueWait {
  int64_t tag;
  std::vector<WaitSignal> signals;
  double blocked_s;
};

class Rma {
 public:
  // `timeout_s` bounds the host's part of every call.
  Rma(std::shared_ptr<Communicator> comm, double timeout_s);

  // Copies `bytes` from `source`, which lies in a window of the communicator, to `offset` of the peer's window, then
  // adds 1 to the peer's signal: that peer sees the bytes once it has waited for it. Puts to one peer in one context
  // arrive in order.
  void put(int64_t peer, uint64_t source, int64_t bytes, const Window& from, const Window& to, int64_t offset,
           int64_t signal, int64_t context, uint64_t stream);
  void signal(int64_t peer, int64_t signal, int64_t context, uint64_t stream);
  // The stream goes on when `count` more signals have come than earlier waits have taken, for each of `signals`.
  void wait(std::vector<WaitSignal> signals, int64_t tag, uint64_t stream);

  // Waits that have blocked their stream for so long since overdue() first saw them begun; asked every now and then.
  std::vector<OverdueWait> overdue(double seconds);
  size_t outstanding();

 private:
  struct Waiting {
    int64_t tag;
    std::vector<WaitSignal> signals;
    std::unique_ptr<cuda::Event> begun, over;
    int64_t since_ns = 0;
  };
  void check_place(int64_t peer, int64_t signal, int64_t context) const;
  void forget_what_is_over();

  std::shared_ptr<Communicator> comm_;
  double timeout_s_;
  std::mutex lock_;
  std::deque<Waiting> waits_;
  std::vector<std::unique_ptr<cuda::Event>> spare_;
};

}  // namespace tide::nccl
