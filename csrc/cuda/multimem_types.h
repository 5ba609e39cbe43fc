// The driver's types for multicast; compared with cuda.h by check_headers.cpp.
#pragma once

#include <cstddef>

namespace tide::cuda {

using ModuleHandle = void*;  // CUmodule

constexpr int kMulticastGranularityMinimum = 0;

// CUmulticastObjectProp.
struct MulticastObjectProp {
  unsigned devices;
  size_t size;
  unsigned long long handle_types;
  unsigned long long flags;
};

}  // namespace tide::cuda
