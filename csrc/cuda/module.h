// Python bindings of the CUDA transport. Documented in tide_strategies/_native.pyi.
#pragma once

#include <nanobind/nanobind.h>

namespace tide::cuda {

void bind(nanobind::module_& m);

}  // namespace tide::cuda
