// Communicators of our own, the memory that they reach, and waiting for NCCL for a limited time.
//
// The communicator of all is non-blocking: what NCCL does in the background is waited for here, up to a deadline. Those
// that are split off it for puts are blocking: NCCL starts a thread for every call of a non-blocking one, which takes
// the host 100 to 200 us a put where a blocking one takes 12 (two H200, NCCL 2.31.2). They connect when they are made,
// so a put has nobody to wait for; one that does not come back all the same is seen by in_call_s(). Everything else
// that NCCL might sit in for ever runs on a thread that is left behind then.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "driver.h"
#include "nccl_library.h"

namespace tide::nccl {

// What a communicator may take up (paper, section 6.1).
struct Limits {
  int64_t contexts;  // RMA contexts: each opens queue pairs to every rank; 0 where only memory is shared
  int64_t signals;   // signals a peer, in each context
  int64_t channels;  // cap of channels, which only NCCL's own collectives use
};

class Communicator {
 public:
  // A new id, to be sent to all ranks as bytes.
  static std::string unique_id();

  // Joins the ranks that share `id`; collective. Throws OsError with ETIMEDOUT if they do not all come in time, and
  // NcclError if multicast is switched off but NCCL could make a multicast object all the same.
  static std::shared_ptr<Communicator> join(int64_t device, const std::string& id, int64_t ranks, int64_t rank,
                                            const Limits& limits, bool multicast, double timeout_s);
  // The ranks that name the same colour, ordered by key, for puts; collective.
  std::shared_ptr<Communicator> split(int64_t color, int64_t key, const Limits& limits, double timeout_s);

  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  cuda::Device& device() const { return device_; }
  int64_t ranks() const { return properties_.ranks; }
  int64_t rank() const { return properties_.rank; }
  const Limits& limits() const { return limits_; }
  const Properties& properties() const { return properties_; }
  bool closed() const { return *handle_ == nullptr || stopping_; }

  // Runs one call of NCCL, device current, and sees it through. One that meets peers must own what it uses.
  enum class Peers { kAlone, kMeets };
  void run(const char* call, int64_t deadline_ns, Peers peers, const std::function<Result(CommHandle)>& f);
  // Seconds that a call which meets nobody has been in NCCL by now; 0 if there is none. From any thread.
  double in_call_s() const;
  // Ends it in order; collective. What is not through after `timeout_s` is aborted.
  void close(double timeout_s);
  // Ends it at once, on this rank. From any thread, also while another is in run().
  void abort();

 private:
  Communicator(cuda::Device& device, const Limits& limits, bool blocking)
      : device_(device), limits_(limits), blocking_(blocking) {}
  // Throws if the communicator is stopped or the deadline over; then it is aborted.
  void go_on(const char* call, int64_t deadline_ns);
  Result elsewhere(const char* call, int64_t deadline_ns, const std::function<Result(CommHandle)>& f);
  void settle(Result first, const char* call, CommHandle comm, int64_t deadline_ns);
  void query();
  void give_up();  // the rest of abort(), once stopping_ is set and no call of ours can follow

  cuda::Device& device_;
  Limits limits_;
  bool blocking_;
  std::atomic<int64_t> in_call_since_ns_{0};
  Properties properties_;
  // On the heap and left there if NCCL may still write it.
  CommHandle* handle_ = new CommHandle(nullptr);
  std::timed_mutex lock_;  // NCCL takes one caller at a time
  std::atomic<bool> stopping_{false};
};

// Device memory that can be registered with communicators: a whole allocation of NCCL's own.
class Memory {
 public:
  Memory(int64_t device, int64_t bytes);
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  int device() const { return device_.ordinal(); }
  uint64_t address() const { return reinterpret_cast<uint64_t>(address_); }
  uint64_t bytes() const { return bytes_; }

 private:
  cuda::Device& device_;
  void* address_ = nullptr;
  uint64_t bytes_;
};

// What is registered: a whole allocation, of NCCL's own or of the driver's (cuda::Allocation).
struct Region {
  int device;
  uint64_t address, bytes;
  std::shared_ptr<const void> owner;
};

// A region registered with a communicator, which all its ranks do together, with equal sizes.
class Window {
 public:
  Window(std::shared_ptr<Communicator> comm, Region region, double timeout_s);
  ~Window();
  Window(const Window&) = delete;
  Window& operator=(const Window&) = delete;

  const std::shared_ptr<Communicator>& comm() const { return comm_; }
  uint64_t address() const { return region_.address; }
  uint64_t bytes() const { return region_.bytes; }
  WindowHandle handle() const { return *handle_; }
  // Where this process sees a peer's memory; 0 if it is out of reach of loads and copies.
  uint64_t peer_address(int64_t peer);
  void close(double timeout_s);

 private:
  std::shared_ptr<Communicator> comm_;
  Region region_;
  WindowHandle* handle_ = new WindowHandle(nullptr);  // as above
};

int64_t deadline_after(double seconds);

}  // namespace tide::nccl
