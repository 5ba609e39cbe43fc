// A stand-in for libcuda.so.1 on host memory, for tests on machines without a GPU.
//
// Device memory is a memory file (its descriptor is what is exported), a stream is a thread that works through a
// queue, stream memory operations act on real memory, a kernel is a host function. It has only what the CUDA
// transport calls, and is stricter than the real driver where that catches mistakes: a context must be current,
// arguments must be right, handles must be known. Functions named fake_* are for tests.
//
//   g++ -std=c++17 -O1 -shared -fPIC -pthread -o libcuda.so.1 fake_*.cpp
//
// Compiled with FAKE_CUDA_OLD it is a driver before CUDA 12.5: no batched copies, no events on whole contexts.
// FAKE_CUDA_CONNECTIONS=1: all streams of a device share one hardware queue, which works strictly in order.
// FAKE_CUDA_BLOCKING=1: every launch, and every stream memory operation, first waits until the device is idle, as the
// real driver may when it loads a kernel, allocates, or has no room left in a queue.
// FAKE_CUDA_DEVICES (2) and FAKE_CUDA_MEMORY (256 MiB a device) are read when the library is initialised.
#include "world.h"

#include <cstdio>

// --- for tests ---

EXPORT uint64_t fake_calls(const char* name) {
  std::lock_guard<std::mutex> hold(world().lock);
  const auto it = world().calls.find(name);
  return it == world().calls.end() ? 0 : it->second;
}
// Gives a stream work that another fake library does.
EXPORT int fake_submit(void* stream, void (*f)(void*), void* argument) {
  return submit(stream, [=] { f(argument); });
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
// Bytes of the host's memory that this process has pinned.
EXPORT uint64_t fake_pinned_memory() {
  std::lock_guard<std::mutex> hold(world().lock);
  uint64_t bytes = 0;
  for (const auto& [page, n] : world().pinned) bytes += n;
  return bytes;
}
// A CUfunction that adds as the sum kernel does; dtype 0 is fp32, 1 bf16.
EXPORT uint64_t fake_sum_function(int staged, int src_dtype, int dst_dtype, int pointers, int null_pointers) {
  auto* f = new FakeFunction{staged, src_dtype, dst_dtype, pointers, null_pointers};
  std::lock_guard<std::mutex> hold(world().lock);
  world().functions.insert(f);
  return reinterpret_cast<uint64_t>(f);
}
// A CUfunction that lands as the landing kernel does.
EXPORT uint64_t fake_land_function(int sources, int dst_dtype, int accumulate, int pointers, int null_pointers) {
  auto* f = new FakeFunction{0, 0, dst_dtype, pointers, null_pointers, sources, accumulate};
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
  for (auto& q : queues)
    if (!q->push([left] { --*left; })) --*left;
  for (int waited = 0; *left > 0 && waited < ms * 5; ++waited) nap();
  return *left == 0;
}
void drain_before_launch(void* stream) {
  const auto q = world().blocking ? queue_of(stream) : nullptr;
  while (q != nullptr && fake_idle(q->device, 100) == 0) {
  }
}

// --- devices and contexts ---

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
  const char* connections = std::getenv("FAKE_CUDA_CONNECTIONS");
  if (connections != nullptr && std::strcmp(connections, "1") == 0) w.only = w.legacy;
  const char* blocking = std::getenv("FAKE_CUDA_BLOCKING");
  w.blocking = blocking != nullptr && std::strcmp(blocking, "1") == 0;
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
    case kMulticastSupported: *value = std::getenv("FAKE_CUDA_MULTICAST") != nullptr; return kSuccess;
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
