#include "stream.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "clock.h"

namespace tide::cuda {
namespace {

// Events for order(): each is in use only between its record and the wait, which captures the record at once.
class EventPool {
 public:
  EventHandle take() {
    {
      std::lock_guard<std::mutex> hold(lock_);
      if (!free_.empty()) {
        EventHandle event = free_.back();
        free_.pop_back();
        return event;
      }
    }
    EventHandle event = nullptr;
    check(api().EventCreate(&event, kEventDisableTiming), "cuEventCreate");
    return event;
  }
  void put_back(EventHandle event) {
    std::lock_guard<std::mutex> hold(lock_);
    free_.push_back(event);
  }

 private:
  std::mutex lock_;
  std::vector<EventHandle> free_;
};

// One pool per context; contexts live as long as the process.
EventPool& pool_of(ContextHandle context) {
  static std::mutex* const lock = new std::mutex;
  static auto* const pools = new std::map<ContextHandle, EventPool*>;
  std::lock_guard<std::mutex> hold(*lock);
  EventPool*& pool = (*pools)[context];
  if (pool == nullptr) pool = new EventPool;
  return *pool;
}

std::atomic<int64_t> patience{60'000'000'000};

bool is_default(uint64_t stream) { return stream == 0 || stream == kStreamLegacy || stream == kStreamPerThread; }

ContextHandle context_of(uint64_t from, uint64_t to) {
  ContextHandle context = nullptr;
  if (!is_default(to)) {
    check(api().StreamGetCtx(reinterpret_cast<StreamHandle>(to), &context), "cuStreamGetCtx");
  } else if (!is_default(from)) {
    check(api().StreamGetCtx(reinterpret_cast<StreamHandle>(from), &context), "cuStreamGetCtx");
  } else {
    check(api().CtxGetCurrent(&context), "cuCtxGetCurrent");
    if (context == nullptr)
      throw std::invalid_argument("both streams are default streams and no CUDA context is current: their device "
                                  "is unknown");
  }
  return context;
}

}  // namespace

Stream::Stream(int64_t device, int64_t priority) : device_(Device::get(device)) {
  const Current current(device_);
  int least = 0, most = 0;
  check(api().CtxGetStreamPriorityRange(&least, &most), "cuCtxGetStreamPriorityRange");
  const int clamped = static_cast<int>(std::clamp<int64_t>(priority, most, least));
  check(api().StreamCreateWithPriority(&handle_, kStreamNonBlocking, clamped), "cuStreamCreateWithPriority");
}

Stream::~Stream() {
  try {
    const Current current(device_);
    (void)api().StreamDestroy(handle_);
  } catch (const std::exception&) {
    // The driver is going down.
  }
}

Event::Event(Device& device) : device_(device) {
  const Current current(device_);
  check(api().EventCreate(&handle_, kEventDisableTiming), "cuEventCreate");
}

Event::~Event() {
  try {
    const Current current(device_);
    (void)api().EventDestroy(handle_);
  } catch (const std::exception&) {
  }
}

void Event::record(StreamHandle stream) {
  const Current current(device_);
  check(api().EventRecord(handle_, stream), "cuEventRecord");
}

bool Event::done() const {
  const Current current(device_);
  const Result r = api().EventQuery(handle_);
  if (r == kErrorNotReady) return false;
  check(r, "cuEventQuery");
  return true;
}

bool Event::wait(int64_t deadline_ns) const {
  for (int64_t pause = 20'000; !done(); pause = std::min<int64_t>(2 * pause, 1'000'000)) {
    if (now_ns() >= deadline_ns) return false;
    sleep_ns(pause);
  }
  return true;
}

StreamHandle own_stream(uint64_t stream) {
  if (is_default(stream))
    throw std::invalid_argument("stream " + std::to_string(stream) +
                                " is a default stream; collectives run on streams of their own (torch.cuda.Stream or "
                                "a Stream of this module)");
  return reinterpret_cast<StreamHandle>(stream);
}

void order(uint64_t from, uint64_t to) {
  if (from == to) return;
  const ContextHandle context = context_of(from, to);
  const Current current(context);
  EventPool& pool = pool_of(context);
  const EventHandle event = pool.take();
  Result r = api().EventRecord(event, reinterpret_cast<StreamHandle>(from));
  const char* call = "cuEventRecord";
  if (r == kSuccess) {
    r = api().StreamWaitEvent(reinterpret_cast<StreamHandle>(to), event, 0);
    call = "cuStreamWaitEvent";
  }
  pool.put_back(event);
  check(r, call);
}

void copy(uint64_t target, uint64_t source, int64_t bytes, uint64_t stream) {
  if (bytes < 0) throw std::invalid_argument("bytes must not be negative; got " + std::to_string(bytes));
  const Current current(context_of(stream, stream));
  check(api().MemcpyDtoDAsync(target, source, static_cast<size_t>(bytes), own_stream(stream)), "cuMemcpyDtoDAsync");
}

int64_t patience_ns() { return patience.load(); }

void be_patient(double seconds) {
  if (!std::isfinite(seconds) || seconds < 0 || seconds > 1e9)
    throw std::invalid_argument("seconds must be between 0 and 1e9; got " + std::to_string(seconds));
  const auto wanted = static_cast<int64_t>(seconds * 1e9);
  for (int64_t now = patience.load(); now < wanted && !patience.compare_exchange_weak(now, wanted);) {
  }
}

bool settle(Device& device, int64_t limit_ns) {
  const int64_t deadline = now_ns() + limit_ns;
  const Current current(device);
  if (api().CtxRecordEvent == nullptr) {
    check(api().CtxSynchronize(), "cuCtxSynchronize");
    return true;
  }
  EventHandle event = nullptr;
  check(api().EventCreate(&event, kEventDisableTiming), "cuEventCreate");
  Result r = api().CtxRecordEvent(device.context(), event);
  for (int64_t pause = 20'000; r == kSuccess; pause = std::min<int64_t>(2 * pause, 1'000'000)) {
    r = api().EventQuery(event);
    if (r != kErrorNotReady || now_ns() >= deadline) break;
    sleep_ns(pause);
    r = kSuccess;
  }
  (void)api().EventDestroy(event);
  if (r == kErrorNotReady) return false;
  check(r, "waiting for the device");
  return true;
}

bool settle_for_teardown(Device& device) {
  const bool through = settle(device, device.stuck.load() ? 20'000'000 : 2'000'000'000);
  device.stuck.store(!through);
  return through;
}

}  // namespace tide::cuda
