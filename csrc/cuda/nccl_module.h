// Python bindings of NCCL. Documented in tide_strategies/_native.pyi.
#pragma once

#include <nanobind/nanobind.h>

namespace tide::nccl {

void bind(nanobind::module_& m);

}  // namespace tide::nccl
