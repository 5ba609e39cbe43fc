// The CUDA driver, found at run time, and the devices' primary contexts.
#pragma once

#include <atomic>
#include <memory>
#include <stdexcept>
#include <string>

#include "driver_types.h"
#include "multimem_types.h"

namespace tide::cuda {

// What the driver refused (Python: RuntimeError). Out of memory is OsError with ENOMEM, waits that took too
// long are OsError with ETIMEDOUT.
struct CudaError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Entry points: member, exported symbol, parameters. All return a Result.
#define TIDE_CUDA_REQUIRED(X)                                                                                  \
  X(Init, "cuInit", (unsigned))                                                                                \
  X(DriverGetVersion, "cuDriverGetVersion", (int*))                                                            \
  X(GetErrorName, "cuGetErrorName", (Result, const char**))                                                    \
  X(GetErrorString, "cuGetErrorString", (Result, const char**))                                                \
  X(DeviceGetCount, "cuDeviceGetCount", (int*))                                                                \
  X(DeviceGet, "cuDeviceGet", (DeviceId*, int))                                                                \
  X(DeviceGetName, "cuDeviceGetName", (char*, int, DeviceId))                                                  \
  X(DeviceGetAttribute, "cuDeviceGetAttribute", (int*, int, DeviceId))                                         \
  X(DeviceTotalMem, "cuDeviceTotalMem_v2", (size_t*, DeviceId))                                                \
  X(DeviceGetUuid, "cuDeviceGetUuid_v2", (Uuid*, DeviceId))                                                    \
  X(DeviceGetPCIBusId, "cuDeviceGetPCIBusId", (char*, int, DeviceId))                                          \
  X(DeviceCanAccessPeer, "cuDeviceCanAccessPeer", (int*, DeviceId, DeviceId))                                  \
  X(DevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain", (ContextHandle*, DeviceId))                            \
  X(CtxPushCurrent, "cuCtxPushCurrent_v2", (ContextHandle))                                                    \
  X(CtxPopCurrent, "cuCtxPopCurrent_v2", (ContextHandle*))                                                     \
  X(CtxGetCurrent, "cuCtxGetCurrent", (ContextHandle*))                                                        \
  X(CtxGetDevice, "cuCtxGetDevice", (DeviceId*))                                                               \
  X(CtxSynchronize, "cuCtxSynchronize", ())                                                                    \
  X(CtxGetStreamPriorityRange, "cuCtxGetStreamPriorityRange", (int*, int*))                                    \
  X(MemGetAllocationGranularity, "cuMemGetAllocationGranularity", (size_t*, const MemAllocationProp*, int))    \
  X(MemCreate, "cuMemCreate", (MemHandle*, size_t, const MemAllocationProp*, unsigned long long))              \
  X(MemRelease, "cuMemRelease", (MemHandle))                                                                   \
  X(MemExportToShareableHandle, "cuMemExportToShareableHandle", (void*, MemHandle, int, unsigned long long))   \
  X(MemImportFromShareableHandle, "cuMemImportFromShareableHandle", (MemHandle*, void*, int))                  \
  X(MemAddressReserve, "cuMemAddressReserve", (DevicePtr*, size_t, size_t, DevicePtr, unsigned long long))     \
  X(MemAddressFree, "cuMemAddressFree", (DevicePtr, size_t))                                                   \
  X(MemMap, "cuMemMap", (DevicePtr, size_t, size_t, MemHandle, unsigned long long))                            \
  X(MemUnmap, "cuMemUnmap", (DevicePtr, size_t))                                                               \
  X(MemSetAccess, "cuMemSetAccess", (DevicePtr, size_t, const MemAccessDesc*, size_t))                         \
  X(MemAlloc, "cuMemAlloc_v2", (DevicePtr*, size_t))                                                           \
  X(MemFree, "cuMemFree_v2", (DevicePtr))                                                                      \
  X(MemHostAlloc, "cuMemHostAlloc", (void**, size_t, unsigned))                                                \
  X(MemFreeHost, "cuMemFreeHost", (void*))                                                                     \
  X(MemHostGetDevicePointer, "cuMemHostGetDevicePointer_v2", (DevicePtr*, void*, unsigned))                    \
  X(StreamCreateWithPriority, "cuStreamCreateWithPriority", (StreamHandle*, unsigned, int))                    \
  X(StreamDestroy, "cuStreamDestroy_v2", (StreamHandle))                                                       \
  X(StreamGetCtx, "cuStreamGetCtx", (StreamHandle, ContextHandle*))                                            \
  X(StreamWaitEvent, "cuStreamWaitEvent", (StreamHandle, EventHandle, unsigned))                               \
  X(EventCreate, "cuEventCreate", (EventHandle*, unsigned))                                                    \
  X(EventDestroy, "cuEventDestroy_v2", (EventHandle))                                                          \
  X(EventRecord, "cuEventRecord", (EventHandle, StreamHandle))                                                 \
  X(EventQuery, "cuEventQuery", (EventHandle))                                                                 \
  X(StreamBatchMemOp, "cuStreamBatchMemOp_v2", (StreamHandle, unsigned, MemOp*, unsigned))                     \
  X(MemcpyDtoHAsync, "cuMemcpyDtoHAsync_v2", (void*, DevicePtr, size_t, StreamHandle))                         \
  X(MemcpyHtoDAsync, "cuMemcpyHtoDAsync_v2", (DevicePtr, const void*, size_t, StreamHandle))                   \
  X(MemsetD8Async, "cuMemsetD8Async", (DevicePtr, unsigned char, size_t, StreamHandle))                        \
  X(MemcpyDtoDAsync, "cuMemcpyDtoDAsync_v2", (DevicePtr, DevicePtr, size_t, StreamHandle))                     \
  X(Memcpy2DAsync, "cuMemcpy2DAsync_v2", (const Memcpy2D*, StreamHandle))                                      \
  X(FuncSetAttribute, "cuFuncSetAttribute", (FunctionHandle, int, int))                                        \
  X(LaunchKernel, "cuLaunchKernel",                                                                            \
    (FunctionHandle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, StreamHandle, void**, void**))

// Null where the driver is older: than CUDA 12.8 for batches of copies, 12.5 for CtxRecordEvent, 12.1 for multicast.
#define TIDE_CUDA_OPTIONAL(X)                                                                                  \
  X(CtxRecordEvent, "cuCtxRecordEvent", (ContextHandle, EventHandle))                                          \
  X(MemcpyBatchAsync, "cuMemcpyBatchAsync",                                                                    \
    (DevicePtr*, DevicePtr*, size_t*, size_t, MemcpyAttributes*, size_t*, size_t, size_t*, StreamHandle))      \
  X(Memcpy3DBatchAsync, "cuMemcpy3DBatchAsync",                                                                \
    (size_t, MemcpyBatchOp*, size_t*, unsigned long long, StreamHandle))                                       \
  X(ModuleLoadData, "cuModuleLoadData", (ModuleHandle*, const void*))                                          \
  X(ModuleGetFunction, "cuModuleGetFunction", (FunctionHandle*, ModuleHandle, const char*))                    \
  X(ModuleUnload, "cuModuleUnload", (ModuleHandle))                                                            \
  X(MulticastCreate, "cuMulticastCreate", (MemHandle*, const MulticastObjectProp*))                            \
  X(MulticastAddDevice, "cuMulticastAddDevice", (MemHandle, DeviceId))                                         \
  X(MulticastBindMem, "cuMulticastBindMem", (MemHandle, size_t, MemHandle, size_t, size_t, unsigned long long)) \
  X(MulticastUnbind, "cuMulticastUnbind", (MemHandle, DeviceId, size_t, size_t))                               \
  X(MulticastGetGranularity, "cuMulticastGetGranularity", (size_t*, const MulticastObjectProp*, int))

struct Api {
#define TIDE_DECLARE(member, symbol, parameters) Result(*member) parameters = nullptr;
  TIDE_CUDA_REQUIRED(TIDE_DECLARE)
  TIDE_CUDA_OPTIONAL(TIDE_DECLARE)
#undef TIDE_DECLARE
};

struct Probe {
  bool available = false;
  std::string reason;  // why not
  int driver_version = 0;
  int devices = 0;
};

// Loads the library and initialises the driver (no context is made). Never throws for a missing driver.
Probe probe();

// The driver's entry points; throws CudaError with probe()'s reason where there is none.
const Api& api();

// Throws unless `result` is success: OsError (ENOMEM) for lack of memory, else CudaError. `call` is what was asked.
void check(Result result, const char* call);
std::string describe(Result result);

// A device and its primary context, the one that torch uses. Contexts are never given up: whatever outlives
// them at exit would fail.
class Device {
 public:
  static Device& get(int64_t ordinal);

  int ordinal() const { return ordinal_; }
  DeviceId id() const { return id_; }
  ContextHandle context() const { return context_; }
  int attribute(Attribute which) const;
  uint64_t granularity() const { return granularity_; }
  // Bytes widened to whole granules.
  uint64_t whole_granules(int64_t bytes) const;
  MemAllocationProp allocation_properties() const;

  // Whether the last wait of a destructor for the device's work was in vain (stream.cpp).
  std::atomic<bool> stuck{false};

 private:
  Device(int ordinal, DeviceId id);
  int ordinal_;
  DeviceId id_;
  ContextHandle context_ = nullptr;
  uint64_t granularity_ = 0;
};

// Checks the range only; makes no context.
DeviceId device_id(int64_t ordinal);

// Makes a context current for the lifetime of this object, on whatever thread.
class Current {
 public:
  explicit Current(const Device& device) : Current(device.context()) {}
  explicit Current(ContextHandle context) { check(api().CtxPushCurrent(context), "cuCtxPushCurrent"); }
  ~Current() {
    ContextHandle popped;
    (void)api().CtxPopCurrent(&popped);
  }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;
};

}  // namespace tide::cuda
