// The arithmetic of the CPU runtime: fp32 <-> bf16 and ordered fp32 sums, in one variant per instruction set.
// All variants give the same bits.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "scaling.h"

namespace tide {

// dst = scale(s0 + s1 + ...), in this order, each addition rounded to fp32; with `accumulate`
// dst = dst + scale(...). No pointer needs alignment. dst may be one of the sources if the types agree.
struct SumJob {
  void* dst;
  const void* const* sources;
  size_t n_sources;
  size_t elements;
  bool src_bf16;
  bool dst_bf16;
  bool accumulate;
  Scale scale;
  float factor;
};

struct Kernels {
  const char* name;
  void (*fp32_to_bf16)(void* dst, const void* src, size_t elements);  // nearest even; NaN stays NaN
  void (*bf16_to_fp32)(void* dst, const void* src, size_t elements);
  void (*sum)(const SumJob& job);
};

const Kernels& kernels();                       // the best for this processor, unless chosen otherwise
std::vector<std::string> kernel_variants();     // those that this processor can run
void use_kernels(const std::string& name);      // std::invalid_argument if it cannot run here

}  // namespace tide
