// A stand-in for libcuda.so.1 on host memory, for tests on machines without a GPU.
//
// Device memory is a memory file (its descriptor is what is exported), a stream is a thread that works through a
// queue, stream memory operations act on real memory, a kernel is a host function. It has only what the CUDA
// transport calls, and is stricter than the real driver where that catches mistakes: a context must be current,
// arguments must be right, handles must be known. Functions named fake_* are for tests.
//
//   g++ -std=c++17 -O1 -shared -fPIC -pthread -o libcuda.so.1 fake_cuda.cpp
//
// Compiled with FAKE_CUDA_OLD it is a driver before CUDA 12.5: no batched copies, no events on whole contexts.
// FAKE_CUDA_DEVICES (2) and FAKE_CUDA_MEMORY (256 MiB a device) are read when the library is initialised.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

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

using namespace tide::cuda;

namespace {

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
  void push(std::function<void()> f) {
    {
      std::lock_guard<std::mutex> hold(lock);
      work.push_back(std::move(f));
    }
    wake.notify_one();
  }
};

void drain(std::shared_ptr<Queue> q) {
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
};
// Of the sum kernel: what its constants would be.
struct FakeFunction {
  int staged, src_dtype, dst_dtype, pointers, null_pointers;
};

struct World {
  std::mutex lock;
  bool ready = false;
  int devices = 0;
  size_t limit = 0;
  std::map<int, size_t> used;
  std::vector<Context*> contexts;
  std::map<void*, std::shared_ptr<Queue>> streams;
  std::vector<std::shared_ptr<Queue>> legacy;
  std::set<FakeEvent*> events;
  std::set<Physical*> physical;
  std::map<uint64_t, Range> ranges;
  std::set<FakeFunction*> functions;
  std::map<std::string, uint64_t> calls;
  unsigned last_grid = 0;
};
World& world() {
  static World* const w = new World;  // threads outlive static destructors
  return *w;
}
std::atomic<bool> hold_host_copies{false};
thread_local std::vector<Context*> context_stack;

void nap() { std::this_thread::sleep_for(std::chrono::microseconds(200)); }

bool enter(const char* name) {
  World& w = world();
  std::lock_guard<std::mutex> hold(w.lock);
  ++w.calls[name];
  return w.ready;
}

#define ENTER(name) \
  if (!enter(name)) return kNotInitialized
#define NEED_CONTEXT() \
  if (context_stack.empty()) return kInvalidContext

std::shared_ptr<Queue> queue_of(void* stream) {
  World& w = world();
  std::lock_guard<std::mutex> hold(w.lock);
  if (stream == nullptr || stream == reinterpret_cast<void*>(kStreamLegacy))
    return w.legacy[static_cast<size_t>(context_stack.back()->device)];
  const auto it = w.streams.find(stream);
  return it == w.streams.end() ? nullptr : it->second;
}

Result submit(void* stream, std::function<void()> f) {
  NEED_CONTEXT();
  const auto q = queue_of(stream);
  if (q == nullptr) return kInvalidHandle;
  if (q->device != context_stack.back()->device) return kInvalidContext;
  q->push(std::move(f));
  return kSuccess;
}

bool known_event(void* e) {
  std::lock_guard<std::mutex> hold(world().lock);
  return world().events.count(static_cast<FakeEvent*>(e)) != 0;
}

float bf16_to_float(uint16_t v) {
  const uint32_t bits = uint32_t{v} << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}
uint16_t float_to_bf16(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  if ((bits & 0x7FFFFFFF) > 0x7F800000) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}
float load(uint64_t base, int64_t i, int dtype) {
  return dtype == 0 ? reinterpret_cast<const float*>(base)[i] : bf16_to_float(reinterpret_cast<const uint16_t*>(base)[i]);
}

struct SumLaunch {
  FakeFunction f;
  const int64_t* tiles;
  int32_t first, count;
  uint64_t staging, output;
  float inverse;
  std::vector<uint64_t> pointers;
};

void run_sum(const SumLaunch& l) {
  for (int32_t t = l.first; t < l.first + l.count; ++t) {
    const int64_t* w = l.tiles + 6 * t;
    for (int64_t i = 0; i < w[5]; ++i) {
      float total = 0;
      for (int s = 0; s < l.f.staged; ++s) {
        const float v = load(l.staging, w[2] + s * w[3] + i, l.f.src_dtype);
        total = s == 0 ? v : total + v;
      }
      const float own = load(l.pointers[static_cast<size_t>(w[0])], w[1] + i, l.f.src_dtype);
      total = (l.f.staged == 0 ? own : total + own) * l.inverse;
      if (l.f.dst_dtype == 0) reinterpret_cast<float*>(l.output)[w[4] + i] = total;
      else reinterpret_cast<uint16_t*>(l.output)[w[4] + i] = float_to_bf16(total);
    }
  }
}

void run_mem_ops(const std::vector<MemOp>& ops) {
  for (const MemOp& op : ops) {
    auto* cell = reinterpret_cast<uint32_t*>(op.address);
    if (op.operation == kWriteValue32) {
      __atomic_store_n(cell, op.value, __ATOMIC_SEQ_CST);
      continue;
    }
    while (static_cast<int32_t>(__atomic_load_n(cell, __ATOMIC_SEQ_CST) - op.value) < 0) nap();
  }
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

// --- for tests ---

EXPORT uint64_t fake_calls(const char* name) {
  std::lock_guard<std::mutex> hold(world().lock);
  const auto it = world().calls.find(name);
  return it == world().calls.end() ? 0 : it->second;
}
EXPORT void fake_hold_host_copies(int hold) { hold_host_copies = hold != 0; }
EXPORT unsigned fake_last_grid() {
  std::lock_guard<std::mutex> hold(world().lock);
  return world().last_grid;
}
EXPORT uint64_t fake_used_memory(int device) {
  std::lock_guard<std::mutex> hold(world().lock);
  return world().used[device];
}
// A CUfunction that adds as the sum kernel does; dtype 0 is fp32, 1 bf16.
EXPORT uint64_t fake_sum_function(int staged, int src_dtype, int dst_dtype, int pointers, int null_pointers) {
  auto* f = new FakeFunction{staged, src_dtype, dst_dtype, pointers, null_pointers};
  std::lock_guard<std::mutex> hold(world().lock);
  world().functions.insert(f);
  return reinterpret_cast<uint64_t>(f);
}
// Whether all streams of the device have run dry within `ms`.
EXPORT int fake_idle(int device, int ms) {
  std::vector<std::shared_ptr<Queue>> queues;
  {
    std::lock_guard<std::mutex> hold(world().lock);
    for (auto& [handle, q] : world().streams)
      if (q->device == device) queues.push_back(q);
  }
  const Flag left = std::make_shared<std::atomic<int>>(static_cast<int>(queues.size()));
  for (auto& q : queues) q->push([left] { --*left; });
  for (int waited = 0; *left > 0 && waited < ms * 5; ++waited) nap();
  return *left == 0;
}

// --- the driver ---

EXPORT Result cuInit(unsigned) {
  World& w = world();
  std::lock_guard<std::mutex> hold(w.lock);
  if (w.ready) return kSuccess;
  const char* devices = std::getenv("FAKE_CUDA_DEVICES");
  const char* memory = std::getenv("FAKE_CUDA_MEMORY");
  w.devices = devices != nullptr ? std::atoi(devices) : 2;
  w.limit = memory != nullptr ? std::strtoull(memory, nullptr, 10) : size_t{256} << 20;
  if (w.devices <= 0) return kErrorNoDevice;
  for (int d = 0; d < w.devices; ++d) {
    w.contexts.push_back(new Context{d});
    w.legacy.push_back(std::make_shared<Queue>(d));
    std::thread(drain, w.legacy.back()).detach();
  }
  w.ready = true;
  return kSuccess;
}
EXPORT Result cuDriverGetVersion(int* v) {
  *v = 13000;
  return kSuccess;
}
EXPORT Result cuGetErrorName(Result r, const char** s) {
  static const std::map<Result, const char*> names = {
      {kInvalidValue, "CUDA_ERROR_INVALID_VALUE"},     {kErrorOutOfMemory, "CUDA_ERROR_OUT_OF_MEMORY"},
      {kNotInitialized, "CUDA_ERROR_NOT_INITIALIZED"}, {kErrorNoDevice, "CUDA_ERROR_NO_DEVICE"},
      {kInvalidContext, "CUDA_ERROR_INVALID_CONTEXT"}, {kInvalidHandle, "CUDA_ERROR_INVALID_HANDLE"}};
  const auto it = names.find(r);
  *s = it == names.end() ? nullptr : it->second;
  return it == names.end() ? kInvalidValue : kSuccess;
}
EXPORT Result cuGetErrorString(Result r, const char** s) {
  *s = r == kErrorNoDevice ? "no CUDA-capable device is detected" : "the fake driver refused";
  return kSuccess;
}
EXPORT Result cuDeviceGetCount(int* n) {
  ENTER("cuDeviceGetCount");
  *n = world().devices;
  return kSuccess;
}
EXPORT Result cuDeviceGet(DeviceId* d, int ordinal) {
  ENTER("cuDeviceGet");
  if (ordinal < 0 || ordinal >= world().devices) return kInvalidValue;
  *d = ordinal;
  return kSuccess;
}
EXPORT Result cuDeviceGetName(char* name, int n, DeviceId d) {
  std::snprintf(name, static_cast<size_t>(n), "Fake GPU %d", d);
  return kSuccess;
}
EXPORT Result cuDeviceGetAttribute(int* value, int which, DeviceId) {
  switch (which) {
    case kAsyncEngineCount: *value = 3; return kSuccess;
    case kComputeCapabilityMajor: *value = 9; return kSuccess;
    case kComputeCapabilityMinor: *value = 0; return kSuccess;
    case kStreamMemOpsV1: *value = 0; return kSuccess;
    case kVirtualMemoryManagement:
    case kPosixFdHandles:
    case k64BitStreamMemOps: *value = 1; return kSuccess;
    case kMulticastSupported: *value = 0; return kSuccess;
    default: return kInvalidValue;
  }
}
EXPORT Result cuDeviceTotalMem_v2(size_t* bytes, DeviceId) {
  *bytes = world().limit;
  return kSuccess;
}
EXPORT Result cuDeviceGetUuid_v2(Uuid* u, DeviceId d) {
  std::memset(u, 0xA0 + d, sizeof *u);
  return kSuccess;
}
EXPORT Result cuDeviceGetPCIBusId(char* text, int n, DeviceId d) {
  std::snprintf(text, static_cast<size_t>(n), "0000:%02X:00.0", d + 1);
  return kSuccess;
}
EXPORT Result cuDeviceCanAccessPeer(int* can, DeviceId a, DeviceId b) {
  *can = a != b;
  return kSuccess;
}
EXPORT Result cuDevicePrimaryCtxRetain(ContextHandle* c, DeviceId d) {
  ENTER("cuDevicePrimaryCtxRetain");
  *c = world().contexts[static_cast<size_t>(d)];
  return kSuccess;
}
EXPORT Result cuCtxPushCurrent_v2(ContextHandle c) {
  ENTER("cuCtxPushCurrent");
  context_stack.push_back(static_cast<Context*>(c));
  return kSuccess;
}
EXPORT Result cuCtxPopCurrent_v2(ContextHandle* c) {
  NEED_CONTEXT();
  *c = context_stack.back();
  context_stack.pop_back();
  return kSuccess;
}
EXPORT Result cuCtxGetCurrent(ContextHandle* c) {
  ENTER("cuCtxGetCurrent");
  *c = context_stack.empty() ? nullptr : context_stack.back();
  return kSuccess;
}
EXPORT Result cuCtxGetDevice(DeviceId* d) {
  NEED_CONTEXT();
  *d = context_stack.back()->device;
  return kSuccess;
}
EXPORT Result cuCtxGetStreamPriorityRange(int* least, int* most) {
  NEED_CONTEXT();
  *least = 0;
  *most = -5;
  return kSuccess;
}
EXPORT Result cuMemGetAllocationGranularity(size_t* g, const MemAllocationProp* p, int) {
  if (p->type != kAllocationPinned || p->location.type != kLocationDevice) return kInvalidValue;
  *g = kGranule;
  return kSuccess;
}

EXPORT Result cuMemCreate(MemHandle* handle, size_t bytes, const MemAllocationProp* p, unsigned long long flags) {
  ENTER("cuMemCreate");
  if (bytes == 0 || bytes % kGranule != 0 || flags != 0 || p->handle_types != kHandlePosixFd ||
      p->type != kAllocationPinned || p->location.type != kLocationDevice)
    return kInvalidValue;
  World& w = world();
  std::lock_guard<std::mutex> hold(w.lock);
  size_t& used = w.used[p->location.id];
  if (used + bytes > w.limit) return kErrorOutOfMemory;
  const int fd = ::memfd_create("fake-cuda", MFD_CLOEXEC);
  if (fd < 0 || ::ftruncate(fd, static_cast<off_t>(bytes)) != 0) return kErrorOutOfMemory;
  used += bytes;
  auto* physical = new Physical{fd, p->location.id, bytes, true};
  w.physical.insert(physical);
  *handle = reinterpret_cast<MemHandle>(physical);
  return kSuccess;
}
EXPORT Result cuMemRelease(MemHandle handle) {
  ENTER("cuMemRelease");
  World& w = world();
  std::lock_guard<std::mutex> hold(w.lock);
  auto* p = reinterpret_cast<Physical*>(handle);
  if (w.physical.erase(p) == 0) return kInvalidValue;
  if (p->created) w.used[p->device] -= p->bytes;
  ::close(p->fd);
  delete p;
  return kSuccess;
}
EXPORT Result cuMemExportToShareableHandle(void* out, MemHandle handle, int type, unsigned long long flags) {
  ENTER("cuMemExportToShareableHandle");
  if (type != kHandlePosixFd || flags != 0) return kInvalidValue;
  *static_cast<int*>(out) = ::fcntl(reinterpret_cast<Physical*>(handle)->fd, F_DUPFD_CLOEXEC, 0);
  return kSuccess;
}
EXPORT Result cuMemImportFromShareableHandle(MemHandle* handle, void* os_handle, int type) {
  ENTER("cuMemImportFromShareableHandle");
  NEED_CONTEXT();
  struct stat info;
  const int fd = ::fcntl(static_cast<int>(reinterpret_cast<intptr_t>(os_handle)), F_DUPFD_CLOEXEC, 0);
  if (type != kHandlePosixFd || fd < 0 || ::fstat(fd, &info) != 0) return kInvalidValue;
  auto* physical = new Physical{fd, -1, static_cast<size_t>(info.st_size), false};
  std::lock_guard<std::mutex> hold(world().lock);
  world().physical.insert(physical);
  *handle = reinterpret_cast<MemHandle>(physical);
  return kSuccess;
}
EXPORT Result cuMemAddressReserve(DevicePtr* out, size_t bytes, size_t alignment, DevicePtr wanted,
                                  unsigned long long flags) {
  ENTER("cuMemAddressReserve");
  if (bytes == 0 || bytes % kGranule != 0 || alignment != 0 || wanted != 0 || flags != 0) return kInvalidValue;
  void* p = ::mmap(nullptr, bytes + kGranule, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) return kErrorOutOfMemory;
  const auto at = reinterpret_cast<uint64_t>(p), aligned = (at + kGranule - 1) / kGranule * kGranule;
  std::lock_guard<std::mutex> hold(world().lock);
  world().ranges[aligned] = {bytes + kGranule, bytes, at};
  *out = aligned;
  return kSuccess;
}
EXPORT Result cuMemAddressFree(DevicePtr at, size_t bytes) {
  ENTER("cuMemAddressFree");
  World& w = world();
  std::lock_guard<std::mutex> hold(w.lock);
  const auto it = w.ranges.find(at);
  if (it == w.ranges.end() || it->second.size != bytes || it->second.mapped) return kInvalidValue;
  ::munmap(reinterpret_cast<void*>(it->second.reserved_at), it->second.reserved);
  w.ranges.erase(it);
  return kSuccess;
}
EXPORT Result cuMemMap(DevicePtr at, size_t bytes, size_t offset, MemHandle handle, unsigned long long flags) {
  ENTER("cuMemMap");
  World& w = world();
  std::lock_guard<std::mutex> hold(w.lock);
  const auto it = w.ranges.find(at);
  auto* p = reinterpret_cast<Physical*>(handle);
  if (it == w.ranges.end() || it->second.mapped || offset != 0 || flags != 0 || bytes % kGranule != 0 ||
      bytes > it->second.size || w.physical.count(p) == 0 || bytes > p->bytes)
    return kInvalidValue;
  if (::mmap(reinterpret_cast<void*>(at), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, p->fd, 0) == MAP_FAILED)
    return kErrorOutOfMemory;
  it->second.mapped = true;
  return kSuccess;
}
EXPORT Result cuMemSetAccess(DevicePtr at, size_t bytes, const MemAccessDesc* access, size_t count) {
  ENTER("cuMemSetAccess");
  World& w = world();
  std::lock_guard<std::mutex> hold(w.lock);
  const auto it = w.ranges.find(at);
  if (it == w.ranges.end() || !it->second.mapped || count != 1 || access->flags != kAccessReadWrite ||
      access->location.type != kLocationDevice || access->location.id >= w.devices)
    return kInvalidValue;
  return ::mprotect(reinterpret_cast<void*>(at), bytes, PROT_READ | PROT_WRITE) == 0 ? kSuccess : kInvalidValue;
}
EXPORT Result cuMemUnmap(DevicePtr at, size_t bytes) {
  ENTER("cuMemUnmap");
  World& w = world();
  std::lock_guard<std::mutex> hold(w.lock);
  const auto it = w.ranges.find(at);
  if (it == w.ranges.end() || !it->second.mapped) return kInvalidValue;
  ::mmap(reinterpret_cast<void*>(at), bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  it->second.mapped = false;
  return kSuccess;
}
EXPORT Result cuMemAlloc_v2(DevicePtr* p, size_t bytes) {
  ENTER("cuMemAlloc");
  NEED_CONTEXT();
  *p = reinterpret_cast<DevicePtr>(std::aligned_alloc(512, (bytes + 511) / 512 * 512));
  return kSuccess;
}
EXPORT Result cuMemFree_v2(DevicePtr p) {
  ENTER("cuMemFree");
  NEED_CONTEXT();
  std::free(reinterpret_cast<void*>(p));
  return kSuccess;
}
EXPORT Result cuMemHostAlloc(void** p, size_t bytes, unsigned flags) {
  ENTER("cuMemHostAlloc");
  NEED_CONTEXT();
  if (flags != (kHostAllocPortable | kHostAllocDeviceMap)) return kInvalidValue;
  *p = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  std::memset(*p, 0xEE, bytes);
  return kSuccess;
}
EXPORT Result cuMemFreeHost(void* p) {
  ENTER("cuMemFreeHost");
  std::free(p);
  return kSuccess;
}
EXPORT Result cuMemHostGetDevicePointer_v2(DevicePtr* d, void* p, unsigned flags) {
  if (flags != 0) return kInvalidValue;
  *d = reinterpret_cast<DevicePtr>(p);
  return kSuccess;
}

EXPORT Result cuStreamCreateWithPriority(StreamHandle* out, unsigned flags, int priority) {
  ENTER("cuStreamCreateWithPriority");
  NEED_CONTEXT();
  if (flags != kStreamNonBlocking || priority > 0 || priority < -5) return kInvalidValue;
  auto q = std::make_shared<Queue>(context_stack.back()->device);
  q->priority = priority;
  std::thread(drain, q).detach();
  std::lock_guard<std::mutex> hold(world().lock);
  *out = q.get();
  world().streams[q.get()] = q;
  return kSuccess;
}
EXPORT Result cuStreamDestroy_v2(StreamHandle s) {
  ENTER("cuStreamDestroy");
  std::shared_ptr<Queue> q;
  {
    std::lock_guard<std::mutex> hold(world().lock);
    const auto it = world().streams.find(s);
    if (it == world().streams.end()) return kInvalidHandle;
    q = it->second;
    world().streams.erase(it);
  }
  std::lock_guard<std::mutex> hold(q->lock);
  q->closing = true;
  q->wake.notify_one();
  return kSuccess;
}
EXPORT Result cuStreamGetCtx(StreamHandle s, ContextHandle* c) {
  const auto q = queue_of(s);
  if (q == nullptr) return kInvalidHandle;
  *c = world().contexts[static_cast<size_t>(q->device)];
  return kSuccess;
}
EXPORT Result cuEventCreate(EventHandle* e, unsigned flags) {
  ENTER("cuEventCreate");
  NEED_CONTEXT();
  if (flags != kEventDisableTiming) return kInvalidValue;
  auto* event = new FakeEvent{context_stack.back()->device, std::make_shared<std::atomic<int>>(0)};
  std::lock_guard<std::mutex> hold(world().lock);
  world().events.insert(event);
  *e = event;
  return kSuccess;
}
EXPORT Result cuEventDestroy_v2(EventHandle e) {
  std::lock_guard<std::mutex> hold(world().lock);
  return world().events.erase(static_cast<FakeEvent*>(e)) != 0 ? kSuccess : kInvalidHandle;  // kept: others may hold it
}
EXPORT Result cuEventRecord(EventHandle e, StreamHandle s) {
  ENTER("cuEventRecord");
  NEED_CONTEXT();
  auto* event = static_cast<FakeEvent*>(e);
  if (!known_event(e) || event->device != context_stack.back()->device) return kInvalidHandle;
  const Flag flag = std::make_shared<std::atomic<int>>(1);
  event->flag = flag;
  return submit(s, [flag] { --*flag; });
}
EXPORT Result cuEventQuery(EventHandle e) {
  if (!known_event(e)) return kInvalidHandle;
  return *static_cast<FakeEvent*>(e)->flag == 0 ? kSuccess : kErrorNotReady;
}
EXPORT Result cuStreamWaitEvent(StreamHandle s, EventHandle e, unsigned flags) {
  ENTER("cuStreamWaitEvent");
  NEED_CONTEXT();
  if (!known_event(e) || flags != 0) return kInvalidHandle;
  const Flag flag = static_cast<FakeEvent*>(e)->flag;
  return submit(s, [flag] { while (*flag > 0) nap(); });
}
static Result record_context(ContextHandle c, EventHandle e) {
  if (!known_event(e)) return kInvalidHandle;
  std::vector<std::shared_ptr<Queue>> queues;
  World& w = world();
  std::lock_guard<std::mutex> hold(w.lock);
  const int device = static_cast<Context*>(c)->device;
  queues.push_back(w.legacy[static_cast<size_t>(device)]);
  for (auto& [handle, q] : w.streams)
    if (q->device == device) queues.push_back(q);
  const Flag flag = std::make_shared<std::atomic<int>>(static_cast<int>(queues.size()));
  static_cast<FakeEvent*>(e)->flag = flag;
  for (auto& q : queues) q->push([flag] { --*flag; });
  return kSuccess;
}
#ifndef FAKE_CUDA_OLD
EXPORT Result cuCtxRecordEvent(ContextHandle c, EventHandle e) {
  ENTER("cuCtxRecordEvent");
  return record_context(c, e);
}
#endif
EXPORT Result cuCtxSynchronize() {
  NEED_CONTEXT();
  EventHandle e;
  cuEventCreate(&e, kEventDisableTiming);
  record_context(context_stack.back(), e);
  while (cuEventQuery(e) == kErrorNotReady) nap();
  return cuEventDestroy_v2(e);
}

EXPORT Result cuStreamBatchMemOp_v2(StreamHandle s, unsigned count, MemOp* ops, unsigned flags) {
  ENTER("cuStreamBatchMemOp");
  if (count == 0 || count >= 256 || flags != 0) return kInvalidValue;
  for (unsigned i = 0; i < count; ++i)
    if ((ops[i].operation != kWaitValue32 && ops[i].operation != kWriteValue32) || ops[i].address % 4 != 0 ||
        ops[i].address == 0 || ops[i].flags != 0)
      return kInvalidValue;
  return submit(s, [batch = std::vector<MemOp>(ops, ops + count)] { run_mem_ops(batch); });
}
EXPORT Result cuMemcpyDtoDAsync_v2(DevicePtr dst, DevicePtr src, size_t n, StreamHandle s) {
  ENTER("cuMemcpyDtoDAsync");
  return submit(s, [=] { std::memcpy(reinterpret_cast<void*>(dst), reinterpret_cast<void*>(src), n); });
}
EXPORT Result cuMemcpyDtoHAsync_v2(void* dst, DevicePtr src, size_t n, StreamHandle s) {
  ENTER("cuMemcpyDtoHAsync");
  return submit(s, [=] {
    while (hold_host_copies) nap();
    std::memcpy(dst, reinterpret_cast<void*>(src), n);
  });
}
EXPORT Result cuMemcpyHtoDAsync_v2(DevicePtr dst, const void* src, size_t n, StreamHandle s) {
  ENTER("cuMemcpyHtoDAsync");
  return submit(s, [=] {
    while (hold_host_copies) nap();
    std::memcpy(reinterpret_cast<void*>(dst), src, n);
  });
}
#ifndef FAKE_CUDA_OLD
EXPORT Result cuMemcpyBatchAsync_v2(DevicePtr* dsts, DevicePtr* srcs, size_t* sizes, size_t count,
                                    MemcpyAttributes* attrs, size_t* indices, size_t n_attrs, StreamHandle s) {
  ENTER("cuMemcpyBatchAsync");
  if (count == 0 || n_attrs != 1 || indices[0] != 0 || attrs->src_access_order != kSrcAccessOrderStream || s == nullptr)
    return kInvalidValue;
  for (size_t i = 0; i < count; ++i)
    if (sizes[i] == 0) return kInvalidValue;
  std::vector<DevicePtr> d(dsts, dsts + count), from(srcs, srcs + count);
  std::vector<size_t> n(sizes, sizes + count);
  return submit(s, [=] {
    for (size_t i = count; i-- > 0;)  // no order is promised within a batch
      std::memcpy(reinterpret_cast<void*>(d[i]), reinterpret_cast<void*>(from[i]), n[i]);
  });
}
#endif
EXPORT Result cuMemcpy2DAsync_v2(const Memcpy2D* copy, StreamHandle s) {
  ENTER("cuMemcpy2DAsync");
  const Memcpy2D c = *copy;
  if (c.src_type != kMemoryTypeDevice || c.dst_type != kMemoryTypeDevice || c.src_pitch < c.width_bytes ||
      c.dst_pitch < c.width_bytes || c.width_bytes == 0 || c.height == 0)
    return kInvalidValue;
  return submit(s, [c] {
    for (size_t r = 0; r < c.height; ++r)
      std::memcpy(reinterpret_cast<char*>(c.dst_device) + r * c.dst_pitch,
                  reinterpret_cast<const char*>(c.src_device) + r * c.src_pitch, c.width_bytes);
  });
}
EXPORT Result cuMemsetD8Async(DevicePtr dst, unsigned char value, size_t n, StreamHandle s) {
  ENTER("cuMemsetD8Async");
  return submit(s, [=] { std::memset(reinterpret_cast<void*>(dst), value, n); });
}
EXPORT Result cuFuncSetAttribute(FunctionHandle f, int attribute, int) {
  ENTER("cuFuncSetAttribute");
  std::lock_guard<std::mutex> hold(world().lock);
  return attribute == kMaxDynamicSharedBytes && world().functions.count(static_cast<FakeFunction*>(f)) != 0
             ? kSuccess
             : kInvalidHandle;
}
EXPORT Result cuLaunchKernel(FunctionHandle f, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by,
                             unsigned bz, unsigned, StreamHandle s, void** args, void** extra) {
  ENTER("cuLaunchKernel");
  {
    std::lock_guard<std::mutex> hold(world().lock);
    if (world().functions.count(static_cast<FakeFunction*>(f)) == 0) return kInvalidHandle;
    world().last_grid = x;
  }
  if (x == 0 || y != 1 || z != 1 || bx == 0 || by != 1 || bz != 1 || extra != nullptr) return kInvalidValue;
  SumLaunch l{*static_cast<FakeFunction*>(f), nullptr, 0, 0, 0, 0, 0, {}};
  size_t at = 0;
  std::memcpy(&l.tiles, args[at++], 8);
  std::memcpy(&l.first, args[at++], 4);
  std::memcpy(&l.count, args[at++], 4);
  std::memcpy(&l.staging, args[at++], 8);
  std::memcpy(&l.output, args[at++], 8);
  std::memcpy(&l.inverse, args[at++], 4);
  for (int i = 0; i < l.f.pointers; ++i) l.pointers.push_back(*static_cast<uint64_t*>(args[at++]));
  for (int i = 0; i < l.f.null_pointers; ++i)
    if (*static_cast<uint64_t*>(args[at++]) != 0) return kInvalidValue;
  if (x > static_cast<unsigned>(l.count)) return kInvalidValue;  // blocks without work
  return submit(s, [l] { run_sum(l); });
}
