// Python bindings of the CUDA transport. Documented in tide_strategies/_native.pyi.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>

#include "memory.h"

namespace tide::cuda {

// Python's Allocation.
struct AllocationHandle {
  std::shared_ptr<Allocation> it;
};

void bind(nanobind::module_& m);

}  // namespace tide::cuda
