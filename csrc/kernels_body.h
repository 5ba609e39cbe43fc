// Body of one kernel variant. Included once per instruction set with TIDE_VARIANT defined; plain loops,
// vectorised by the compiler. Nothing here may have external linkage apart from the table at the end:
// the linker would be free to keep the copy that was compiled for a newer processor.

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels.h"

namespace tide {
namespace {

constexpr size_t kBlock = 2048;  // fp32 accumulators of 8 KiB stay in the first-level cache

struct Fp32 {
  static constexpr size_t kBytes = 4;
  static inline float load(const unsigned char* p) {
    float value;
    std::memcpy(&value, p, sizeof value);  // memcpy: unaligned and alias-safe, still one instruction
    return value;
  }
  static inline void store(unsigned char* p, float value) { std::memcpy(p, &value, sizeof value); }
};

struct Bf16 {
  static constexpr size_t kBytes = 2;
  static inline float load(const unsigned char* p) {
    uint16_t half;
    std::memcpy(&half, p, sizeof half);
    const uint32_t bits = uint32_t{half} << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
  }
  static inline void store(unsigned char* p, float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    // Adding 0x7FFF plus the lowest kept bit rounds to nearest even and carries into the exponent as it
    // should, up to infinity. A NaN must not be carried into infinity: it is cut and made quiet.
    const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    const uint32_t quiet = (bits >> 16) | 0x40u;
    const bool is_nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
    const uint16_t half = static_cast<uint16_t>(is_nan ? quiet : rounded);
    std::memcpy(p, &half, sizeof half);
  }
};

template <class From, class To>
void convert(void* dst, const void* src, size_t elements) {
  unsigned char* __restrict to = static_cast<unsigned char*>(dst);
  const unsigned char* __restrict from = static_cast<const unsigned char*>(src);
  for (size_t i = 0; i < elements; ++i) To::store(to + i * To::kBytes, From::load(from + i * From::kBytes));
}

template <class Src>
void load_block(float* __restrict acc, const unsigned char* __restrict s, size_t n) {
  for (size_t i = 0; i < n; ++i) acc[i] = Src::load(s + i * Src::kBytes);
}

template <class Src>
void add_block(float* __restrict acc, const unsigned char* __restrict s, size_t n) {
  for (size_t i = 0; i < n; ++i) acc[i] = acc[i] + Src::load(s + i * Src::kBytes);
}

// Two sources in one pass over the accumulators; the order of the additions is that of two add_blocks.
template <class Src>
void add_two_blocks(float* __restrict acc, const unsigned char* __restrict s, const unsigned char* __restrict t,
                    size_t n) {
  for (size_t i = 0; i < n; ++i)
    acc[i] = (acc[i] + Src::load(s + i * Src::kBytes)) + Src::load(t + i * Src::kBytes);
}

void scale_block(float* __restrict acc, Scale scale, float factor, size_t n) {
  if (scale == Scale::kMultiply)
    for (size_t i = 0; i < n; ++i) acc[i] = acc[i] * factor;
  else if (scale == Scale::kDivide)
    for (size_t i = 0; i < n; ++i) acc[i] = acc[i] / factor;
}

template <class Dst>
void store_block(unsigned char* __restrict d, const float* __restrict acc, bool accumulate, size_t n) {
  if (accumulate)
    for (size_t i = 0; i < n; ++i) {
      unsigned char* at = d + i * Dst::kBytes;
      Dst::store(at, Dst::load(at) + acc[i]);
    }
  else
    for (size_t i = 0; i < n; ++i) Dst::store(d + i * Dst::kBytes, acc[i]);
}

template <class Src, class Dst>
void sum(const SumJob& job) {
  alignas(64) float acc[kBlock];
  unsigned char* dst = static_cast<unsigned char*>(job.dst);
  for (size_t begin = 0; begin < job.elements; begin += kBlock) {
    const size_t n = job.elements - begin < kBlock ? job.elements - begin : kBlock;
    const auto source = [&](size_t k) {
      return static_cast<const unsigned char*>(job.sources[k]) + begin * Src::kBytes;
    };
    load_block<Src>(acc, source(0), n);
    size_t k = 1;
    for (; k + 1 < job.n_sources; k += 2) add_two_blocks<Src>(acc, source(k), source(k + 1), n);
    if (k < job.n_sources) add_block<Src>(acc, source(k), n);
    scale_block(acc, job.scale, job.factor, n);
    store_block<Dst>(dst + begin * Dst::kBytes, acc, job.accumulate, n);
  }
}

void sum_any(const SumJob& job) {
  if (job.src_bf16)
    job.dst_bf16 ? sum<Bf16, Bf16>(job) : sum<Bf16, Fp32>(job);
  else
    job.dst_bf16 ? sum<Fp32, Bf16>(job) : sum<Fp32, Fp32>(job);
}

}  // namespace

#define TIDE_TABLE_NAME(variant) kernels_##variant
#define TIDE_TABLE(variant) TIDE_TABLE_NAME(variant)
#define TIDE_TEXT_OF(text) #text
#define TIDE_TEXT(text) TIDE_TEXT_OF(text)

extern const Kernels TIDE_TABLE(TIDE_VARIANT);
const Kernels TIDE_TABLE(TIDE_VARIANT) = {TIDE_TEXT(TIDE_VARIANT), convert<Fp32, Bf16>, convert<Bf16, Fp32>, sum_any};

}  // namespace tide
