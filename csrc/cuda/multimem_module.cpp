#include "multimem_module.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "module.h"
#include "multimem_kernel.h"
#include "multimem_object.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace tide::cuda {
namespace {

struct MulticastHandle {
  std::shared_ptr<Multicast> it;
};

using Released = nb::call_guard<nb::gil_scoped_release>;

void bind_object(nb::module_& m) {
  m.def("multicast_switched_off", &multicast_switched_off);
  m.def("multicast_refusal", &multicast_refusal, "device"_a, Released());
  nb::class_<MulticastHandle>(m, "Multicast")
      .def_static("whole_bytes", &Multicast::whole_bytes, "device"_a, "devices"_a, "bytes"_a, Released())
      .def("__init__", [](MulticastHandle* self, int64_t device, int64_t devices, int64_t bytes) {
        new (self) MulticastHandle{std::make_shared<Multicast>(device, devices, bytes)};
      }, "device"_a, "devices"_a, "bytes"_a, Released())
      .def_static("from_fd", [](int fd, int64_t device, int64_t devices, int64_t bytes) {
        return MulticastHandle{Multicast::from_fd(fd, device, devices, bytes)};
      }, "fd"_a, "device"_a, "devices"_a, "bytes"_a, Released())
      .def("export_fd", [](const MulticastHandle& o) { return o.it->export_fd(); }, Released())
      .def("add_device", [](MulticastHandle& o) { o.it->add_device(); }, Released())
      .def("bind", [](MulticastHandle& o, const AllocationHandle& memory) { o.it->bind(memory.it); }, "memory"_a,
           Released())
      .def("map", [](MulticastHandle& o) { o.it->map(); }, Released())
      .def_prop_ro("device", [](const MulticastHandle& o) { return o.it->device(); })
      .def_prop_ro("address", [](const MulticastHandle& o) { return o.it->address(); })
      .def_prop_ro("bytes", [](const MulticastHandle& o) { return o.it->bytes(); });
}

void bind_kernel(nb::module_& m) {
  nb::class_<Kernel>(m, "Kernel")
      .def("__init__", [](Kernel* self, int64_t device, const nb::bytes& image, const std::string& name) {
        const std::string_view text(static_cast<const char*>(image.data()), image.size());
        nb::gil_scoped_release release;
        new (self) Kernel(device, text, name);
      }, "device"_a, "image"_a, "name"_a)
      .def_prop_ro("function", &Kernel::function)
      .def_prop_ro("device", &Kernel::device)
      .def("launch", [](const Kernel& k, uint64_t table, int64_t first, int64_t count, uint64_t output, float divisor,
                        std::vector<uint64_t> addresses, int64_t ctas, int64_t threads, uint64_t stream) {
        k.launch({table, first, count, 0, output, Scaling::by(divisor), std::move(addresses)}, ctas, threads, stream);
      }, "table"_a, "first"_a, "count"_a, "output"_a, "divisor"_a, "addresses"_a, "ctas"_a, "threads"_a, "stream"_a,
         Released());
  m.def("landing_source", &landing_source);
}

}  // namespace

void bind_multimem(nb::module_& m) {
  bind_object(m);
  bind_kernel(m);
}

}  // namespace tide::cuda
