#include "nccl_module.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "../tensor.h"
#include "module.h"
#include "nccl_comm.h"
#include "nccl_rma.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace tide::nccl {
namespace {

// What Python holds. The objects behind keep each other alive by these pointers, not through Python.
struct CommHandleObject {
  std::shared_ptr<Communicator> it;
};
struct MemoryObject {
  std::shared_ptr<Memory> it;
};
struct WindowObject {
  std::shared_ptr<Window> it;
};

using Released = nb::call_guard<nb::gil_scoped_release>;
using Tensor = nb::ndarray<nb::array_api, nb::ndim<1>, nb::c_contig>;

nb::dict probe_dict() {
  const Probe p = probe();
  nb::dict d;
  d["available"] = p.available;
  d["reason"] = p.reason;
  d["version"] = p.version != 0 ? nb::object(nb::str(version_words(p.version).c_str())) : nb::object(nb::none());
  d["path"] = p.path;
  return d;
}

Tensor tensor_of(nb::pointer_and_handle<MemoryObject> self, int64_t byte_offset, int64_t numel,
                 const std::string& name) {
  const Memory& memory = *self.p->it;
  const nb::dlpack::dtype dtype = dtype_from_name(name);
  check_within(byte_offset, numel, dtype, name, memory.bytes());
  const auto shape = static_cast<size_t>(numel);
  return Tensor(reinterpret_cast<void*>(memory.address() + static_cast<uint64_t>(byte_offset)), 1, &shape, self.h,
                nullptr, dtype, nb::device::cuda::value, memory.device());
}

template <class Object>
void make_window(WindowObject* self, const CommHandleObject& comm, const Object& memory, double timeout_s) {
  const auto& it = *memory.it;
  new (self) WindowObject{
      std::make_shared<Window>(comm.it, Region{it.device(), it.address(), it.bytes(), memory.it}, timeout_s)};
}

void bind_comm(nb::module_& m) {
  nb::class_<CommHandleObject>(m, "Communicator")
      .def_static("join", [](int64_t device, const nb::bytes& id, int64_t ranks, int64_t rank, int64_t contexts,
                             int64_t signals, int64_t channels, bool multicast, double timeout_s) {
        const std::string text(static_cast<const char*>(id.data()), id.size());
        nb::gil_scoped_release release;
        return CommHandleObject{
            Communicator::join(device, text, ranks, rank, {contexts, signals, channels}, multicast, timeout_s)};
      }, "device"_a, "id"_a, "ranks"_a, "rank"_a, "contexts"_a, "signals"_a, "channels"_a, "multicast"_a,
         "timeout_s"_a)
      .def("split", [](const CommHandleObject& c, int64_t color, int64_t key, int64_t contexts, int64_t signals,
                       int64_t channels, double timeout_s) {
        return CommHandleObject{c.it->split(color, key, {contexts, signals, channels}, timeout_s)};
      }, "color"_a, "key"_a, "contexts"_a, "signals"_a, "channels"_a, "timeout_s"_a, Released())
      .def_prop_ro("in_call_s", [](const CommHandleObject& c) { return c.it->in_call_s(); })
      .def_prop_ro("device", [](const CommHandleObject& c) { return c.it->device().ordinal(); })
      .def_prop_ro("ranks", [](const CommHandleObject& c) { return c.it->ranks(); })
      .def_prop_ro("rank", [](const CommHandleObject& c) { return c.it->rank(); })
      .def_prop_ro("contexts", [](const CommHandleObject& c) { return c.it->limits().contexts; })
      .def_prop_ro("hosts", [](const CommHandleObject& c) { return c.it->properties().lsa_teams; })
      .def_prop_ro("host_rma", [](const CommHandleObject& c) { return c.it->properties().host_rma; })
      .def_prop_ro("multimem", [](const CommHandleObject& c) { return c.it->properties().multimem; })
      .def_prop_ro("closed", [](const CommHandleObject& c) { return c.it->closed(); })
      .def("close", [](CommHandleObject& c, double timeout_s) { c.it->close(timeout_s); }, "timeout_s"_a, Released())
      .def("abort", [](CommHandleObject& c) { c.it->abort(); }, Released());
  m.def("unique_id", [] {
    const std::string id = Communicator::unique_id();
    return nb::bytes(id.data(), id.size());
  });
}

void bind_memory(nb::module_& m) {
  nb::class_<MemoryObject>(m, "Memory")
      .def("__init__", [](MemoryObject* self, int64_t device, int64_t bytes) {
        new (self) MemoryObject{std::make_shared<Memory>(device, bytes)};
      }, "device"_a, "bytes"_a, Released())
      .def_prop_ro("device", [](const MemoryObject& o) { return o.it->device(); })
      .def_prop_ro("address", [](const MemoryObject& o) { return o.it->address(); })
      .def_prop_ro("bytes", [](const MemoryObject& o) { return o.it->bytes(); })
      .def("tensor", &tensor_of, "byte_offset"_a, "numel"_a, "dtype"_a);
  nb::class_<WindowObject>(m, "Window")
      .def("__init__", &make_window<MemoryObject>, "comm"_a, "memory"_a, "timeout_s"_a, Released())
      .def("__init__", &make_window<cuda::MappingHandle>, "comm"_a, "memory"_a, "timeout_s"_a, Released())
      .def_prop_ro("bytes", [](const WindowObject& o) { return o.it->bytes(); })
      .def_prop_ro("address", [](const WindowObject& o) { return o.it->address(); })
      .def("peer_address", [](const WindowObject& o, int64_t peer) { return o.it->peer_address(peer); }, "peer"_a,
           Released())
      .def("close", [](WindowObject& o, double timeout_s) { o.it->close(timeout_s); }, "timeout_s"_a, Released());
}

nb::list overdue_list(const std::vector<OverdueWait>& found) {
  nb::list list;
  for (const OverdueWait& w : found) {
    nb::list signals;
    for (const WaitSignal& s : w.signals) signals.append(nb::make_tuple(s.peer, s.count, s.signal, s.context));
    nb::dict d;
    d["tag"] = w.tag;
    d["signals"] = signals;
    d["blocked_s"] = w.blocked_s;
    list.append(d);
  }
  return list;
}

void bind_rma(nb::module_& m) {
  using Signals = std::vector<std::tuple<int, int, int, int>>;
  nb::class_<Rma>(m, "Rma")
      .def("__init__", [](Rma* self, const CommHandleObject& comm, double timeout_s) {
        new (self) Rma(comm.it, timeout_s);
      }, "comm"_a, "timeout_s"_a)
      .def("put", [](Rma& r, int64_t peer, uint64_t source, int64_t bytes, const WindowObject& source_window,
                     const WindowObject& window, int64_t offset, int64_t signal, int64_t context, uint64_t stream) {
        r.put(peer, source, bytes, *source_window.it, *window.it, offset, signal, context, stream);
      }, "peer"_a, "source"_a, "bytes"_a, "source_window"_a, "window"_a, "offset"_a, "signal"_a, "context"_a,
         "stream"_a, Released())
      .def("signal", &Rma::signal, "peer"_a, "signal"_a, "context"_a, "stream"_a, Released())
      .def("wait", [](Rma& r, const Signals& signals, int64_t tag, uint64_t stream) {
        std::vector<WaitSignal> all;
        for (const auto& [peer, count, signal, context] : signals) all.push_back({count, peer, signal, context});
        r.wait(std::move(all), tag, stream);
      }, "signals"_a, "tag"_a, "stream"_a, Released())
      .def("overdue", [](Rma& r, double seconds) {
        std::vector<OverdueWait> found;
        {
          nb::gil_scoped_release release;
          found = r.overdue(seconds);
        }
        return overdue_list(found);
      }, "seconds"_a)
      .def("outstanding", &Rma::outstanding, Released());
}

}  // namespace

void bind(nb::module_& m) {
  m.attr("NEEDED") = version_words(kVersion);
  m.def("probe", &probe_dict);
  bind_comm(m);
  bind_memory(m);
  bind_rma(m);
}

}  // namespace tide::nccl
