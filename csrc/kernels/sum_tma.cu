// The reduce-scatter's level 1 for sm_90a: fp32 sums of staged and own bf16 gradients, fed by TMA (paper, 4.1).
//
// The arithmetic, the table of tiles and the order of additions are those of kernels/sum.py, with ALIGNED: offsets and
// strides are multiples of 8 elements, addresses of 16 bytes. Differences for the launcher: the addresses are one
// argument of 256 int64 (by value), a row counts kTile elements at most, blocks have kThreads threads, and ``stages``
// says how much dynamic shared memory. One warp issues bulk copies into a ring, eight warps add.

#include <cuda_runtime.h>  // float4, uint2

#include <cstdint>

namespace {

constexpr int kTile = 2048;
constexpr int kConsumers = 256;
constexpr int kThreads = kConsumers + 32;
constexpr int kWords = 6;
constexpr int kMaxStages = 16;
constexpr int kRingBytes = 192 * 1024;
constexpr int kSourceBytes = kTile * 2;
constexpr int kFrontBytes = 1024;  // barriers and slots, before the ring

/// Tiles of the ring; a block's dynamic shared memory is kFrontBytes + stages * (staged + 1) * kSourceBytes.
__host__ __device__ constexpr int stages(int staged) {
  const int fit = kRingBytes / ((staged + 1) * kSourceBytes);
  return fit < kMaxStages ? fit : kMaxStages;
}

struct Addresses {
  int64_t of[256];
};

/// What the consumers need to know of a tile.
struct Slot {
  int64_t output;
  int64_t count;
};

struct Row {
  int64_t word[kWords];
};

struct Front {
  uint64_t full[kMaxStages];
  uint64_t empty[kMaxStages];
  Slot slot[kMaxStages];
};
static_assert(sizeof(Front) <= kFrontBytes);

__device__ uint32_t shared(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

__device__ void init(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared(barrier)), "r"(arrivals) : "memory");
}

__device__ void arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared(barrier)) : "memory");
}

__device__ void arrive_expecting(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared(barrier)), "r"(bytes) : "memory");
}

__device__ void wait(uint64_t* barrier, uint32_t parity) {
  asm volatile(
      "{\n\t.reg .pred done;\nagain:\n"
      "\tmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n\t@!done bra again;\n}" ::"r"(shared(barrier)),
      "r"(parity)
      : "memory");
}

__device__ void bulk_copy(void* to, const void* from, uint32_t bytes, uint64_t* barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;" ::"r"(shared(to)),
      "l"(from), "r"(bytes), "r"(shared(barrier)), "l"(policy)
      : "memory");
}

__device__ Row load_row(const int64_t* tiles, int64_t row) {
  Row out;
#pragma unroll
  for (int w = 0; w < kWords; ++w) out.word[w] = tiles[row * kWords + w];
  return out;
}

template <int kStaged>
__device__ void produce(Front* front, unsigned char* ring, const int64_t* tiles, int first, int n,
                        const uint16_t* staging, const Addresses& addresses) {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  constexpr int kStages = stages(kStaged);
  int stage = 0;
  uint32_t parity = 1;  // a fresh ring is empty: waiting for the phase before the first returns at once
  int tile = blockIdx.x;
  Row next = tile < n ? load_row(tiles, int64_t{first} + tile) : Row{};
  for (; tile < n; tile += gridDim.x) {
    const Row row = next;
    // The next row is on its way while this tile waits for its place in the ring.
    if (tile + static_cast<int>(gridDim.x) < n) next = load_row(tiles, int64_t{first} + tile + gridDim.x);
    const int64_t own = addresses.of[row.word[0]];
    // Whole 16-byte pieces: one that holds an element of the tile holds no byte of another page.
    const uint32_t bytes = static_cast<uint32_t>((row.word[5] + 7) / 8 * 16);
    wait(&front->empty[stage], parity);
    front->slot[stage] = {row.word[4], row.word[5]};
    arrive_expecting(&front->full[stage], bytes * (kStaged + 1));
    unsigned char* to = ring + stage * (kStaged + 1) * kSourceBytes;
    if (bytes > 0) {
#pragma unroll
      for (int s = 0; s < kStaged; ++s)
        bulk_copy(to + s * kSourceBytes, staging + row.word[2] + s * row.word[3], bytes, &front->full[stage], policy);
      bulk_copy(to + kStaged * kSourceBytes, reinterpret_cast<const uint16_t*>(own) + row.word[1], bytes,
                &front->full[stage], policy);
    }
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
}

__device__ float4 widen(uint2 pair) {
  return {__uint_as_float(pair.x << 16), __uint_as_float(pair.x & 0xffff0000u), __uint_as_float(pair.y << 16),
          __uint_as_float(pair.y & 0xffff0000u)};
}

/// The rounded sum of four elements; __fadd_rn and __fmul_rn are never contracted.
template <int kStaged>
__device__ float4 sum4(const unsigned char* tile, int element, float inverse) {
  float4 total = widen(*reinterpret_cast<const uint2*>(tile + element * 2));
#pragma unroll
  for (int s = 1; s <= kStaged; ++s) {
    const float4 more = widen(*reinterpret_cast<const uint2*>(tile + s * kSourceBytes + element * 2));
    total.x = __fadd_rn(total.x, more.x), total.y = __fadd_rn(total.y, more.y);
    total.z = __fadd_rn(total.z, more.z), total.w = __fadd_rn(total.w, more.w);
  }
  return {__fmul_rn(total.x, inverse), __fmul_rn(total.y, inverse), __fmul_rn(total.z, inverse),
          __fmul_rn(total.w, inverse)};
}

__device__ void store4(float* to, float4 value, int64_t left) {
  if (left >= 4) {
    *reinterpret_cast<float4*>(to) = value;
    return;
  }
  if (left > 0) to[0] = value.x;
  if (left > 1) to[1] = value.y;
  if (left > 2) to[2] = value.z;
}

template <int kStaged>
__device__ void consume(Front* front, const unsigned char* ring, int n, float* output, float inverse) {
  constexpr int kStages = stages(kStaged);
  constexpr int kPieces = kTile / (4 * kConsumers);
  int stage = 0;
  uint32_t parity = 0;
  for (int tile = blockIdx.x; tile < n; tile += gridDim.x) {
    wait(&front->full[stage], parity);
    const Slot slot = front->slot[stage];
    const unsigned char* from = ring + stage * (kStaged + 1) * kSourceBytes;
    float4 sums[kPieces];
#pragma unroll
    for (int i = 0; i < kPieces; ++i)  // past the count this adds what an earlier tile left, and stores nothing
      sums[i] = sum4<kStaged>(from, 4 * (i * kConsumers + static_cast<int>(threadIdx.x)), inverse);
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(&front->empty[stage]);
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int at = 4 * (i * kConsumers + static_cast<int>(threadIdx.x));
      store4(output + slot.output + at, sums[i], slot.count - at);
    }
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
}

template <int kStaged>
__device__ void sum(const int64_t* tiles, int first, int n, const uint16_t* staging, float* output, float inverse,
                    const Addresses& addresses) {
  extern __shared__ __align__(128) unsigned char memory[];
  Front* front = reinterpret_cast<Front*>(memory);
  unsigned char* ring = memory + kFrontBytes;
  if (threadIdx.x == 0) {
    for (int s = 0; s < stages(kStaged); ++s) {
      init(&front->full[s], 1);
      init(&front->empty[s], kConsumers / 32);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncthreads();
  if (threadIdx.x < kConsumers) {
    consume<kStaged>(front, ring, n, output, inverse);
  } else if (threadIdx.x == kConsumers) {
    produce<kStaged>(front, ring, tiles, first, n, staging, addresses);
  }
}

}  // namespace

#define TIDE_SUM_TMA(STAGED)                                                                                        \
  extern "C" __global__ void __launch_bounds__(kThreads, 1)                                                         \
      sum_tma_##STAGED(const int64_t* tiles, int first, int n, const uint16_t* staging, float* output, float inverse, \
                       const __grid_constant__ Addresses addresses) {                                               \
    sum<STAGED>(tiles, first, n, staging, output, inverse, addresses);                                              \
  }

TIDE_SUM_TMA(0)
TIDE_SUM_TMA(1)
TIDE_SUM_TMA(2)
TIDE_SUM_TMA(3)
TIDE_SUM_TMA(4)
TIDE_SUM_TMA(5)
TIDE_SUM_TMA(6)
TIDE_SUM_TMA(7)
