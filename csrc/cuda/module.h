// Python bindings of the CUDA transport. Documented in tide_strategies/_native.pyi.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>

#include "memory.h"

namespace tide::cuda {

// Python's Allocation and Mapping.
struct AllocationHandle {
  std::shared_ptr<Allocation> it;
};
struct MappingHandle {
  std::shared_ptr<Mapping> it;
  uint64_t address() const { return it->address(); }
  uint64_t bytes() const { return it->bytes(); }
  int device() const { return it->device(); }
};

void bind(nanobind::module_& m);

}  // namespace tide::cuda
