// What the parts of the fake driver share.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "../../csrc/cuda/driver_types.h"
#include "../../csrc/cuda/multimem_types.h"

using namespace tide::cuda;

#define EXPORT extern "C" __attribute__((visibility("default")))

constexpr Result kInvalidValue = 1, kNotInitialized = 3, kInvalidContext = 201, kInvalidHandle = 400;
constexpr size_t kGranule = 2 << 20;

using Flag = std::shared_ptr<std::atomic<int>>;  // work left

struct Queue {
  int device;
  int priority = 0;
  std::mutex lock;
  std::condition_variable wake;
  std::deque<std::function<void()>> work;
  bool closing = false;

  explicit Queue(int d) : device(d) {}
  // Whether it will run: what another thread closes meanwhile, and has run dry, takes nothing more.
  bool push(std::function<void()> f) {
    {
      std::lock_guard<std::mutex> hold(lock);
      if (closing && work.empty()) return false;
      work.push_back(std::move(f));
    }
    wake.notify_one();
    return true;
  }
};

inline void drain(std::shared_ptr<Queue> q) {
  for (;;) {
    std::function<void()> f;
    {
      std::unique_lock<std::mutex> hold(q->lock);
      q->wake.wait(hold, [&] { return q->closing || !q->work.empty(); });
      if (q->work.empty()) return;
      f = std::move(q->work.front());
      q->work.pop_front();
    }
    f();
  }
}

struct Context {
  int device;
};
struct FakeEvent {
  int device;
  Flag flag;
};
struct Physical {
  int fd, device;
  size_t bytes;
  bool created;
};
struct Range {
  size_t reserved, size;
  uint64_t reserved_at;
  bool mapped = false, accessible = false;
  int shown_fd = -1;
};
// Of a kernel: what its constants would be. Landed partials are `sources`, 0 for the kernel of staged sums.
struct FakeFunction {
  int staged, src_dtype, dst_dtype, pointers, null_pointers, sources = 0, accumulate = 0;
};

struct World {
  std::mutex lock;
  bool ready = false;
  int devices = 0;
  size_t limit = 0;
  std::map<int, size_t> used;
  std::map<void*, size_t> pinned;  // of the host
  std::vector<Context*> contexts;
  std::map<void*, std::shared_ptr<Queue>> streams;
  std::vector<std::shared_ptr<Queue>> legacy;
  std::set<FakeEvent*> events;
  std::set<Physical*> physical;
  std::map<uint64_t, Range> ranges;
  std::set<FakeFunction*> functions;
  bool blocking = false;  // with FAKE_CUDA_BLOCKING=1
  std::vector<std::shared_ptr<Queue>> only;  // with FAKE_CUDA_CONNECTIONS=1: the one queue of each device
  std::map<std::string, uint64_t> calls;
  unsigned last_grid = 0;
  // Kernels out of modules: blocks, threads, stream, arguments.
  std::map<void*, std::function<Result(unsigned, unsigned, StreamHandle, void**)>> kernels;
};
inline World& world() {
  static World* const w = new World;  // threads outlive static destructors
  return *w;
}
inline std::atomic<bool> hold_host_copies{false};
inline thread_local std::vector<Context*> context_stack;

// The longer a thread has waited, the longer it sleeps: many streams wait at once, and processors are few.
inline void nap(int before = 0) {
  std::this_thread::sleep_for(std::chrono::microseconds(before < 18 ? 200 + 100 * before : 2000));
}

inline bool enter(const char* name) {
  World& w = world();
  std::lock_guard<std::mutex> hold(w.lock);
  ++w.calls[name];
  return w.ready;
}

#define ENTER(name) \
  if (!enter(name)) return kNotInitialized
#define NEED_CONTEXT() \
  if (context_stack.empty()) return kInvalidContext

inline std::shared_ptr<Queue> queue_of(void* stream) {
  World& w = world();
  std::lock_guard<std::mutex> hold(w.lock);
  if (stream == nullptr || stream == reinterpret_cast<void*>(kStreamLegacy))
    return w.legacy[static_cast<size_t>(context_stack.back()->device)];
  const auto it = w.streams.find(stream);
  return it == w.streams.end() ? nullptr : it->second;
}

// With FAKE_CUDA_BLOCKING=1, a launch waits until all work given to its device is through, for as long as that takes.
void drain_before_launch(void* stream);

inline Result submit(void* stream, std::function<void()> f) {
  NEED_CONTEXT();
  const auto q = queue_of(stream);
  if (q == nullptr) return kInvalidHandle;
  if (q->device != context_stack.back()->device) return kInvalidContext;
  q->push(std::move(f));
  return kSuccess;
}

inline bool known_event(void* e) {
  std::lock_guard<std::mutex> hold(world().lock);
  return world().events.count(static_cast<FakeEvent*>(e)) != 0;
}

// What a copy does: to an address of a multicast object it writes every memory behind it.
void store(void* to, const void* from, size_t bytes);
