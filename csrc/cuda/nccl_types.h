// The part of NCCL's binary interface that is used here, as of 2.31.2, declared anew so that building needs no NCCL.
// nccl_check_headers.cpp compares it with nccl.h wherever that is found.
#pragma once

#include <climits>
#include <cstddef>
#include <cstdint>

namespace tide::nccl {

using Result = int;          // ncclResult_t
using CommHandle = void*;    // ncclComm_t
using WindowHandle = void*;  // ncclWindow_t
using StreamHandle = void*;  // cudaStream_t, which is CUstream

constexpr Result kSuccess = 0;
constexpr Result kInProgress = 7;
constexpr int kInt8 = 0;                      // ncclInt8
constexpr int kCollSymmetric = 1;             // NCCL_WIN_COLL_SYMMETRIC
constexpr unsigned kMagic = 0xcafebeef;       // NCCL_API_MAGIC
constexpr int kUndefined = INT_MIN;           // NCCL_CONFIG_UNDEF_INT
constexpr unsigned kVersion = 23102;          // of these declarations, and the oldest library that serves
constexpr size_t kUniqueIdBytes = 128;

struct UniqueId {
  char internal[kUniqueIdBytes];
};

// ncclConfig_t. A newer library reads no more of it than `size`.
struct Config {
  size_t size = sizeof(Config);
  unsigned magic = kMagic;
  unsigned version = kVersion;
  int blocking = kUndefined;
  int cga_cluster_size = kUndefined;
  int min_ctas = kUndefined;
  int max_ctas = kUndefined;
  const char* net_name = nullptr;
  int split_share = kUndefined;
  int traffic_class = kUndefined;
  const char* comm_name = nullptr;
  int collnet_enable = kUndefined;
  int cta_policy = kUndefined;
  int shrink_share = kUndefined;
  int nvls_ctas = kUndefined;
  int channels_per_net_peer = kUndefined;
  int nvlink_centric_sched = kUndefined;
  int graph_usage_mode = kUndefined;
  int num_rma_ctx = kUndefined;
  int max_p2p_peers = kUndefined;
  int graph_stream_ordering = kUndefined;
  int launch_order_implicit = kUndefined;
  int num_rma_sig = kUndefined;
  int rma_eager_init = kUndefined;
  int host_cft_mode = kUndefined;
};

// ncclWaitSignalDesc_t.
struct WaitSignal {
  int count;
  int peer;
  int signal;
  int context;
};

// ncclCommProperties_t. A newer library fills in what the stated version has.
struct Properties {
  size_t size = sizeof(Properties);
  unsigned magic = kMagic;
  unsigned version = kVersion;
  int rank = 0;
  int ranks = 0;
  int cuda_device = 0;
  int nvml_device = 0;
  bool device_api = false;
  bool multimem = false;
  int gin_type = 0;
  int lsa_teams = 0;
  bool host_rma = false;
  int railed_gin_type = 0;
  uint64_t comm_hash = 0;
  int gin_min_stride = 0;
  int gin_connection_type = 0;
  bool gin_support[64] = {};
  size_t dev_comm_runtime_version_size = 0;
};

// Entry points: member, result, parameters; the exported symbol is "nccl" with the member's name.
#define TIDE_NCCL_ENTRY_POINTS(X)                                                                              \
  X(GetVersion, Result, (int*))                                                                                \
  X(GetErrorString, const char*, (Result))                                                                     \
  X(GetLastError, const char*, (CommHandle))                                                                   \
  X(GetUniqueId, Result, (UniqueId*))                                                                          \
  X(CommInitRankConfig, Result, (CommHandle*, int, UniqueId, int, Config*))                                    \
  X(CommSplit, Result, (CommHandle, int, int, CommHandle*, Config*))                                           \
  X(CommGetAsyncError, Result, (CommHandle, Result*))                                                          \
  X(CommQueryProperties, Result, (CommHandle, Properties*))                                                    \
  X(CommAbort, Result, (CommHandle))                                                                           \
  X(CommFinalize, Result, (CommHandle))                                                                        \
  X(CommDestroy, Result, (CommHandle))                                                                         \
  X(MemAlloc, Result, (void**, size_t))                                                                        \
  X(MemFree, Result, (void*))                                                                                  \
  X(CommWindowRegister, Result, (CommHandle, void*, size_t, WindowHandle*, int))                               \
  X(CommWindowDeregister, Result, (CommHandle, WindowHandle))                                                  \
  X(GetPeerDevicePointer, Result, (WindowHandle, size_t, int, void**))                                         \
  X(PutSignal, Result,                                                                                         \
    (const void*, size_t, int, int, WindowHandle, size_t, int, int, unsigned, CommHandle, StreamHandle))       \
  X(Signal, Result, (int, int, int, unsigned, CommHandle, StreamHandle))                                       \
  X(WaitSignal, Result, (int, WaitSignal*, CommHandle, StreamHandle))

struct Api {
#define TIDE_DECLARE(member, result, parameters) result(*member) parameters = nullptr;
  TIDE_NCCL_ENTRY_POINTS(TIDE_DECLARE)
#undef TIDE_DECLARE
};

}  // namespace tide::nccl
