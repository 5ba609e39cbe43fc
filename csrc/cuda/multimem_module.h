// Python bindings of multicast and of kernels that come as compiled images. Documented in tide_strategies/_native.pyi.
#pragma once

#include <nanobind/nanobind.h>

namespace tide::cuda {

void bind_multimem(nanobind::module_& m);

}  // namespace tide::cuda
