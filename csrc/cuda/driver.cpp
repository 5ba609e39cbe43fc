#include "driver.h"

#include <dlfcn.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <map>
#include <mutex>

#include "error.h"

namespace tide::cuda {
namespace {

struct Library {
  std::mutex lock;
  bool loaded = false;
  std::atomic<bool> initialised{false};
  Api entry;
};

Library& library() {
  static Library* const it = new Library;  // never destroyed: tensors may outlive static destructors
  return *it;
}

void* open_library(std::string* reason) {
  if (const char* path = std::getenv("TIDE_LIBCUDA"); path != nullptr && *path != '\0') {
    void* handle = ::dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) *reason = std::string("TIDE_LIBCUDA cannot be loaded: ") + ::dlerror();
    return handle;
  }
  // Containers put the driver outside the linker's path at times.
  for (const char* name : {"libcuda.so.1", "/usr/local/nvidia/lib64/libcuda.so.1", "/usr/lib64/libcuda.so.1",
                           "/usr/lib/x86_64-linux-gnu/libcuda.so.1", "/usr/lib/aarch64-linux-gnu/libcuda.so.1",
                           "/usr/lib/wsl/lib/libcuda.so.1"}) {
    if (void* handle = ::dlopen(name, RTLD_NOW | RTLD_LOCAL)) return handle;
    if (reason->empty()) *reason = std::string("no CUDA driver: ") + ::dlerror();
  }
  return nullptr;
}

template <class F>
void find(void* handle, const char* symbol, F** target) {
  *target = reinterpret_cast<F*>(::dlsym(handle, symbol));
}

bool load(Library& lib, std::string* reason) {
  if (lib.loaded) return true;
  void* handle = open_library(reason);
  if (handle == nullptr) return false;
  const char* missing = nullptr;
#define TIDE_FIND(member, symbol, parameters)  \
  find(handle, symbol, &lib.entry.member);     \
  if (lib.entry.member == nullptr && missing == nullptr) missing = symbol;
  TIDE_CUDA_REQUIRED(TIDE_FIND)
#undef TIDE_FIND
#define TIDE_FIND(member, symbol, parameters) find(handle, symbol, &lib.entry.member);
  TIDE_CUDA_OPTIONAL(TIDE_FIND)
#undef TIDE_FIND
  if (missing != nullptr) {
    *reason = std::string("the CUDA driver has no ") + missing + ": it is too old (CUDA 12.0 or newer is needed)";
    ::dlclose(handle);
    return false;
  }
  lib.loaded = true;
  return true;
}

bool initialise(Library& lib, std::string* reason) {
  if (lib.initialised) return true;
  if (!load(lib, reason)) return false;
  if (const Result r = lib.entry.Init(0); r != kSuccess) {
    const char* words = nullptr;
    (void)lib.entry.GetErrorString(r, &words);
    *reason = "cuInit failed: " + std::string(words != nullptr ? words : "error") + " (" + std::to_string(r) + ")";
    return false;
  }
  lib.initialised = true;
  return true;
}

}  // namespace

Probe probe() {
  Library& lib = library();
  std::lock_guard<std::mutex> hold(lib.lock);
  Probe p;
  const bool ready = initialise(lib, &p.reason);
  if (lib.loaded) (void)lib.entry.DriverGetVersion(&p.driver_version);
  if (!ready) return p;
  if (lib.entry.DeviceGetCount(&p.devices) != kSuccess || p.devices <= 0) {
    p.devices = 0;
    p.reason = "the CUDA driver sees no device";
    return p;
  }
  p.available = true;
  return p;
}

const Api& api() {
  Library& lib = library();
  // Once set it stays; the lock below is for the first call alone.
  if (lib.initialised.load(std::memory_order_acquire)) return lib.entry;
  std::lock_guard<std::mutex> hold(lib.lock);
  std::string reason;
  if (!initialise(lib, &reason)) throw CudaError(reason);
  return lib.entry;
}

std::string describe(Result result) {
  const char *name = nullptr, *words = nullptr;
  (void)api().GetErrorName(result, &name);
  (void)api().GetErrorString(result, &words);
  return std::string(name != nullptr ? name : "unknown error") + " (" + std::to_string(result) + ")" +
         (words != nullptr ? std::string(": ") + words : "");
}

void check(Result result, const char* call) {
  if (result == kSuccess) return;
  const std::string words = std::string(call) + " failed: " + describe(result);
  if (result == kErrorOutOfMemory) throw OsError(ENOMEM, words);
  throw CudaError(words);
}

DeviceId device_id(int64_t ordinal) {
  int count = 0;
  check(api().DeviceGetCount(&count), "cuDeviceGetCount");
  if (ordinal < 0 || ordinal >= count)
    throw std::invalid_argument("device is " + std::to_string(ordinal) + "; allowed: 0 to " +
                                std::to_string(count - 1));
  DeviceId id = 0;
  check(api().DeviceGet(&id, static_cast<int>(ordinal)), "cuDeviceGet");
  return id;
}

Device& Device::get(int64_t ordinal) {
  static std::mutex* const lock = new std::mutex;
  static auto* const devices = new std::map<int64_t, Device*>;
  std::lock_guard<std::mutex> hold(*lock);
  Device*& device = (*devices)[ordinal];
  if (device == nullptr) device = new Device(static_cast<int>(ordinal), device_id(ordinal));
  return *device;
}

Device::Device(int ordinal, DeviceId id) : ordinal_(ordinal), id_(id) {
  check(api().DevicePrimaryCtxRetain(&context_, id_), "cuDevicePrimaryCtxRetain");
  const MemAllocationProp prop = allocation_properties();
  size_t granule = 0;
  check(api().MemGetAllocationGranularity(&granule, &prop, kGranularityMinimum), "cuMemGetAllocationGranularity");
  granularity_ = granule;
}

int Device::attribute(Attribute which) const {
  int value = 0;
  check(api().DeviceGetAttribute(&value, which, id_), "cuDeviceGetAttribute");
  return value;
}

uint64_t Device::whole_granules(int64_t bytes) const {
  if (bytes <= 0 || bytes > (int64_t{1} << 46))
    throw std::invalid_argument("bytes must be between 1 and 2**46; got " + std::to_string(bytes));
  return (static_cast<uint64_t>(bytes) + granularity_ - 1) / granularity_ * granularity_;
}

MemAllocationProp Device::allocation_properties() const {
  MemAllocationProp prop{};
  prop.type = kAllocationPinned;
  prop.handle_types = kHandlePosixFd;
  prop.location = {kLocationDevice, ordinal_};
  int rdma = 0;  // so that a network card can read and write it, should it be registered for that
  if (api().DeviceGetAttribute(&rdma, kRdmaWithVmm, id_) == kSuccess) prop.flags.gpu_direct_rdma = rdma != 0;
  return prop;
}

}  // namespace tide::cuda
