// Landing through the NVSwitch (paper, section 4.2): one load adds what all GPUs of the node hold at an address.
//
// Compiled at run time for the GPU at hand (tide_strategies/runtime/cuda/nvrtc.py), so it includes nothing. Macros:
//   TIDE_PARTIAL_BF16  the partials are bf16 (added in fp32, and rounded to bf16 by the switch), else fp32
//   TIDE_OUTPUT_BF16   the output is bf16, else fp32
//   TIDE_ACCUMULATE    the sum is added to what the output holds
//
// The arguments are those of the other kernels over tiles (csrc/cuda/sum.h): the table, its first row and number of
// rows, staging (not read), output, factor, whether it divides, and the addresses that rows refer to by number; these
// are multicast ones.
// A row is four int64: element offset in the output, elements, number of the address, element offset from it.
//
// out = [out +] sum * factor (or sum / factor), each operation one rounding. Loads are whole pieces of 16 bytes, whatever
// the offsets: a piece that holds an element of the tile holds no byte of another page, and lanes beyond the tile are
// not used.

typedef long long Int64;
typedef unsigned long long Address;

constexpr int kRowWords = 4;
constexpr int kUnroll = 4;  // loads in flight a thread: they cross the switch

#ifdef TIDE_PARTIAL_BF16
typedef unsigned Word;  // two bf16
constexpr int kLanes = 8;
#else
typedef float Word;
constexpr int kLanes = 4;
#endif
constexpr int kItem = 16 / kLanes;

struct Piece {
  Word words[4];
};
struct Scale {
  float factor;
  int divides;
};

#if !defined(__CUDACC__) && !defined(__CUDACC_RTC__)
// On a host, tests say what the switch would give.
void multimem_model(Address address, Word* words);
#endif

static __device__ __forceinline__ Piece ld_reduce(Address address) {
  Piece p = {};
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#ifdef TIDE_PARTIAL_BF16
  asm volatile("multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.bf16x2 {%0, %1, %2, %3}, [%4];"
               : "=r"(p.words[0]), "=r"(p.words[1]), "=r"(p.words[2]), "=r"(p.words[3])
               : "l"(address)
               : "memory");
#else
  asm volatile("multimem.ld_reduce.relaxed.sys.global.add.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(p.words[0]), "=f"(p.words[1]), "=f"(p.words[2]), "=f"(p.words[3])
               : "l"(address)
               : "memory");
#endif
#elif defined(__CUDA_ARCH__)
  __trap();  // nothing older has the instruction; nobody launches this there
#elif !defined(__CUDACC__) && !defined(__CUDACC_RTC__)
  multimem_model(address, p.words);
#endif
  return p;
}

static __device__ __forceinline__ float lane_of(const Piece& p, int lane) {
#ifdef TIDE_PARTIAL_BF16
  const unsigned word = p.words[lane / 2];
  return __uint_as_float(lane % 2 == 0 ? word << 16 : word & 0xffff0000u);
#else
  return p.words[lane];
#endif
}

#ifdef TIDE_OUTPUT_BF16
typedef unsigned short Output;
#ifdef TIDE_ACCUMULATE
static __device__ __forceinline__ float widen(Output v) { return __uint_as_float(static_cast<unsigned>(v) << 16); }
#endif
static __device__ __forceinline__ Output narrow(float f) {
  const unsigned bits = __float_as_uint(f);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<Output>(bits >> 16 | 0x40u);  // NaN stays one
  return static_cast<Output>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);                  // to nearest even
}
#else
typedef float Output;
#ifdef TIDE_ACCUMULATE
static __device__ __forceinline__ float widen(Output v) { return v; }
#endif
static __device__ __forceinline__ Output narrow(float f) { return f; }
#endif

static __device__ __forceinline__ Output landed(Output old, float sum, Scale scale) {
  const float scaled = scale.divides != 0 ? __fdiv_rn(sum, scale.factor) : __fmul_rn(sum, scale.factor);
#ifdef TIDE_ACCUMULATE
  return narrow(__fadd_rn(widen(old), scaled));
#else
  (void)old;
  return narrow(scaled);
#endif
}

#if !defined(TIDE_PARTIAL_BF16) && !defined(TIDE_OUTPUT_BF16)
// 16 bytes at once: compilers make four accesses of a struct.
#ifdef TIDE_ACCUMULATE
static __device__ __forceinline__ void load4(const float* from, float* v) {
#ifdef __CUDA_ARCH__
  asm volatile("ld.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3])
               : "l"(from)
               : "memory");
#else
  for (int i = 0; i < 4; ++i) v[i] = from[i];
#endif
}
#endif
static __device__ __forceinline__ void store4(float* to, const float* v) {
#ifdef __CUDA_ARCH__
  asm volatile("st.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]) : "memory");
#else
  for (int i = 0; i < 4; ++i) to[i] = v[i];
#endif
}
#endif

// The lanes of one piece that lie within [0, count); `first` is the element that its lane 0 would be.
static __device__ __forceinline__ void store(const Piece& p, Output* output, Int64 first, Int64 count, Scale scale) {
#if !defined(TIDE_PARTIAL_BF16) && !defined(TIDE_OUTPUT_BF16)
  if (first >= 0 && first + kLanes <= count && reinterpret_cast<Address>(output + first) % 16 == 0) {
    float v[4] = {};
#ifdef TIDE_ACCUMULATE
    load4(output + first, v);
#endif
    for (int i = 0; i < 4; ++i) v[i] = landed(v[i], p.words[i], scale);
    store4(output + first, v);
    return;
  }
#endif
  for (int lane = 0; lane < kLanes; ++lane) {
    const Int64 i = first + lane;
    if (i >= 0 && i < count) output[i] = landed(output[i], lane_of(p, lane), scale);
  }
}

extern "C" __global__ void __launch_bounds__(512)
    land_multimem(const Int64* tiles, int first_tile, int n_tiles, const void*, void* output, float factor, int divides,
                  Address a0, Address a1, Address a2, Address a3) {
  for (int t = blockIdx.x; t < n_tiles; t += gridDim.x) {
    const Int64* const row = tiles + (static_cast<Int64>(first_tile) + t) * kRowWords;
    Output* const to = static_cast<Output*>(output) + row[0];
    const Int64 count = row[1];
    const Address base = row[2] == 0 ? a0 : row[2] == 1 ? a1 : row[2] == 2 ? a2 : a3;
    const Address from = base + static_cast<Address>(row[3] * kItem);
    const int head = static_cast<int>(from % 16) / kItem;  // lanes of the first piece before the tile
    const Int64 pieces = count > 0 ? (head + count + kLanes - 1) / kLanes : 0;
    const Address start = from - static_cast<Address>(head * kItem);
    for (Int64 i = threadIdx.x; i < pieces; i += static_cast<Int64>(blockDim.x) * kUnroll) {
      Piece loaded[kUnroll];
      for (int u = 0; u < kUnroll; ++u)
        if (i + u * static_cast<Int64>(blockDim.x) < pieces)
          loaded[u] = ld_reduce(start + static_cast<Address>(i + u * static_cast<Int64>(blockDim.x)) * 16);
      for (int u = 0; u < kUnroll; ++u) {
        const Int64 piece = i + u * static_cast<Int64>(blockDim.x);
        if (piece < pieces) store(loaded[u], to, piece * kLanes - head, count, {factor, divides});
      }
    }
  }
}
