// The part of the CUDA driver's binary interface that is used here, declared anew so that building needs no
// CUDA toolkit. check_headers.cpp compares it with cuda.h wherever that is found.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tide::cuda {

using Result = int;           // CUresult
using DeviceId = int;         // CUdevice
using DevicePtr = uint64_t;   // CUdeviceptr
using MemHandle = uint64_t;   // CUmemGenericAllocationHandle
using ContextHandle = void*;  // CUcontext
using StreamHandle = void*;   // CUstream
using EventHandle = void*;    // CUevent
using FunctionHandle = void*; // CUfunction

constexpr Result kSuccess = 0;
constexpr Result kErrorOutOfMemory = 2;
constexpr Result kErrorNoDevice = 100;
constexpr Result kErrorNotReady = 600;

// CU_STREAM_LEGACY and CU_STREAM_PER_THREAD; null means the former.
constexpr uint64_t kStreamLegacy = 1;
constexpr uint64_t kStreamPerThread = 2;

enum Attribute : int {
  kAsyncEngineCount = 40,
  kComputeCapabilityMajor = 75,
  kComputeCapabilityMinor = 76,
  kStreamMemOpsV1 = 92,
  kVirtualMemoryManagement = 102,
  kPosixFdHandles = 103,
  kRdmaWithVmm = 110,
  k64BitStreamMemOps = 122,
  kMulticastSupported = 132,
};
enum FunctionAttribute : int { kMaxDynamicSharedBytes = 8 };

constexpr unsigned kStreamNonBlocking = 1;
constexpr unsigned kEventDisableTiming = 2;
constexpr unsigned kHostAllocPortable = 1;
constexpr unsigned kHostAllocDeviceMap = 2;

constexpr int kLocationDevice = 1;
constexpr int kAllocationPinned = 1;
constexpr int kHandlePosixFd = 1;
constexpr int kAccessReadWrite = 3;
constexpr int kGranularityMinimum = 0;

struct MemLocation {
  int type;
  int id;
};

struct MemAllocationProp {
  int type;
  int handle_types;
  MemLocation location;
  void* win32;
  struct {
    unsigned char compression, gpu_direct_rdma;
    unsigned short usage;
    unsigned char reserved[4];
  } flags;
};

struct MemAccessDesc {
  MemLocation location;
  int flags;
};

constexpr int kMemoryTypeDevice = 2;

// CUDA_MEMCPY2D.
struct Memcpy2D {
  size_t src_x, src_y;
  int src_type;
  const void* src_host;
  DevicePtr src_device;
  void* src_array;
  size_t src_pitch;
  size_t dst_x, dst_y;
  int dst_type;
  void* dst_host;
  DevicePtr dst_device;
  void* dst_array;
  size_t dst_pitch;
  size_t width_bytes, height;
};

constexpr int kSourceInStreamOrder = 1;
constexpr unsigned kPreferOverlapWithCompute = 1;
constexpr int kOperandPointer = 1;

// CUmemcpyAttributes.
struct MemcpyAttributes {
  int source_order;
  MemLocation source_hint, target_hint;
  unsigned flags;
};

// CUmemcpy3DOperand of a pointer, whose elements are bytes.
struct MemcpyOperand {
  int type;
  DevicePtr address;
  size_t row_length, layer_height;
  MemLocation hint;
};

// CUDA_MEMCPY3D_BATCH_OP.
struct MemcpyBatchOp {
  MemcpyOperand src, dst;
  size_t extent[3];
  int source_order;
  unsigned flags;
};

constexpr int kWaitValue32 = 1;
constexpr int kWriteValue32 = 2;
constexpr unsigned kWaitGeq = 0;       // (int32_t)(*address - value) >= 0
constexpr unsigned kWriteDefault = 0;  // after everything before it is visible to the whole system

// CUstreamBatchMemOpParams, for waits and writes of 32-bit values, which share one layout.
struct MemOp {
  int operation;
  DevicePtr address;
  union {
    uint32_t value;
    uint64_t value64;
  };
  unsigned flags;
  DevicePtr alias;
  uint64_t pad;
};

struct Uuid {
  unsigned char bytes[16];
};

}  // namespace tide::cuda
