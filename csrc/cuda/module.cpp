#include "module.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "../tensor.h"
#include "control.h"
#include "host_memory.h"
#include "memory.h"
#include "multimem_module.h"
#include "program.h"
#include "stream.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace tide::cuda {
namespace {

// What Python holds. The objects behind keep each other alive by these pointers, not through Python.
struct WindowHandle {
  std::shared_ptr<Window> it;
  uint64_t address() const { return it->address(); }
  uint64_t bytes() const { return it->bytes(); }
  int device() const { return it->device(); }
};
struct ControlHandle {
  std::shared_ptr<Control> it;
};
struct ProgramHandle {
  std::shared_ptr<Program> it;
};

std::string_view view(const nb::bytes& b) { return {static_cast<const char*>(b.data()), b.size()}; }

using Released = nb::call_guard<nb::gil_scoped_release>;
using Tensor = nb::ndarray<nb::array_api, nb::ndim<1>, nb::c_contig>;

template <class View>
Tensor tensor_of(nb::pointer_and_handle<View> self, int64_t byte_offset, int64_t numel, const std::string& name) {
  const nb::dlpack::dtype dtype = dtype_from_name(name);
  check_within(byte_offset, numel, dtype, name, self.p->bytes());
  const auto shape = static_cast<size_t>(numel);
  return Tensor(reinterpret_cast<void*>(self.p->address() + static_cast<uint64_t>(byte_offset)), 1, &shape, self.h,
                nullptr, dtype, nb::device::cuda::value, self.p->device());
}

nb::dict probe_dict() {
  Probe p;
  try {
    nb::gil_scoped_release release;
    p = probe();
  } catch (const std::exception& e) {
    p.reason = e.what();
  }
  nb::dict d;
  d["available"] = p.available;
  d["reason"] = p.reason;
  d["driver_version"] = p.driver_version;
  d["devices"] = p.devices;
  return d;
}

std::string uuid_text(const Uuid& uuid) {
  static const char digits[] = "0123456789abcdef";
  std::string text = "GPU-";
  for (size_t i = 0; i < 16; ++i) {
    if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    text += digits[uuid.bytes[i] >> 4];
    text += digits[uuid.bytes[i] & 15];
  }
  return text;
}

nb::dict device_info(int64_t ordinal) {
  const DeviceId id = device_id(ordinal);
  const Api& cu = api();
  char name[256] = {}, bus[64] = {};
  size_t total = 0, granule = 0;
  Uuid uuid{};
  check(cu.DeviceGetName(name, sizeof(name) - 1, id), "cuDeviceGetName");
  check(cu.DeviceTotalMem(&total, id), "cuDeviceTotalMem");
  check(cu.DeviceGetPCIBusId(bus, sizeof(bus) - 1, id), "cuDeviceGetPCIBusId");
  check(cu.DeviceGetUuid(&uuid, id), "cuDeviceGetUuid");
  const auto attribute = [&](Attribute which) {
    int value = 0;  // attributes that an old driver does not know count as "no"
    return cu.DeviceGetAttribute(&value, which, id) == kSuccess ? value : 0;
  };
  MemAllocationProp prop{};
  prop.type = kAllocationPinned;
  prop.handle_types = kHandlePosixFd;
  prop.location = {kLocationDevice, static_cast<int>(ordinal)};
  const bool posix_fd = attribute(kVirtualMemoryManagement) != 0 && attribute(kPosixFdHandles) != 0;
  if (posix_fd) check(cu.MemGetAllocationGranularity(&granule, &prop, kGranularityMinimum), "cuMemGetAllocationGranularity");
  nb::dict d;
  d["name"] = std::string(name);
  d["compute_capability"] = nb::make_tuple(attribute(kComputeCapabilityMajor), attribute(kComputeCapabilityMinor));
  d["total_memory"] = total;
  d["async_engines"] = attribute(kAsyncEngineCount);
  d["can_use_64_bit_stream_mem_ops"] = attribute(k64BitStreamMemOps) != 0;
  // The attribute of this name is for the interface before CUDA 12; ours is there with every newer driver.
  d["stream_mem_ops"] = cu.StreamBatchMemOp != nullptr;
  d["posix_fd"] = posix_fd;
  d["multicast_supported"] = attribute(kMulticastSupported) != 0;
  d["pci_bus_id"] = std::string(bus);
  d["uuid"] = uuid_text(uuid);
  d["granularity"] = granule;
  return d;
}

bool can_access_peer(int64_t a, int64_t b) {
  const DeviceId first = device_id(a), second = device_id(b);
  if (first == second) return true;
  int can = 0;
  check(api().DeviceCanAccessPeer(&can, first, second), "cuDeviceCanAccessPeer");
  return can != 0;
}

void bind_memory(nb::module_& m) {
  nb::class_<AllocationHandle>(m, "Allocation")
      .def("__init__", [](AllocationHandle* self, int64_t device, int64_t bytes) {
        new (self) AllocationHandle{std::make_shared<Allocation>(device, bytes)};
      }, "device"_a, "bytes"_a, Released())
      .def_static("from_fd", [](int fd, int64_t bytes, int64_t device) {
        return AllocationHandle{Allocation::from_fd(fd, bytes, device)};
      }, "fd"_a, "bytes"_a, "device"_a, Released())
      .def("export_fd", [](const AllocationHandle& a) { return a.it->export_fd(); }, Released())
      .def_prop_ro("device", [](const AllocationHandle& a) { return a.it->device(); })
      .def_prop_ro("bytes", [](const AllocationHandle& a) { return a.it->bytes(); });
  nb::class_<MappingHandle>(m, "Mapping")
      .def("__init__", [](MappingHandle* self, const AllocationHandle& allocation, int64_t device) {
        new (self) MappingHandle{std::make_shared<Mapping>(allocation.it, device)};
      }, "allocation"_a, "device"_a, Released())
      .def_prop_ro("device", &MappingHandle::device)
      .def_prop_ro("address", &MappingHandle::address)
      .def_prop_ro("bytes", &MappingHandle::bytes)
      .def("tensor", &tensor_of<MappingHandle>, "byte_offset"_a, "numel"_a, "dtype"_a);
  nb::class_<WindowHandle>(m, "Window")
      .def("__init__", [](WindowHandle* self, int64_t device, int64_t bytes) {
        new (self) WindowHandle{std::make_shared<Window>(device, bytes)};
      }, "device"_a, "bytes"_a, Released())
      .def("map", [](WindowHandle& w, const AllocationHandle& allocation) { w.it->map(allocation.it); },
           "allocation"_a, Released())
      .def("unmap", [](WindowHandle& w) { w.it->unmap(); }, Released())
      .def("poison", [](WindowHandle& w) { w.it->unmap(); }, Released())
      .def_prop_ro("device", &WindowHandle::device)
      .def_prop_ro("address", &WindowHandle::address)
      .def_prop_ro("bytes", &WindowHandle::bytes)
      .def("tensor", &tensor_of<WindowHandle>, "byte_offset"_a, "numel"_a, "dtype"_a);
  nb::class_<Stream>(m, "Stream")
      .def(nb::init<int64_t, int64_t>(), "device"_a, "priority"_a, Released())
      .def_prop_ro("device", &Stream::device)
      .def_prop_ro("handle", &Stream::number);
  nb::class_<HostMemory>(m, "HostMemory")
      .def(nb::init<int64_t, int64_t, int64_t>(), "device"_a, "bytes"_a, "marks"_a = 0, Released())
      .def_prop_ro("address", &HostMemory::address)
      .def_prop_ro("bytes", &HostMemory::bytes)
      .def_prop_ro("pinned_bytes", &HostMemory::pinned_bytes)
      .def("fetch", &HostMemory::fetch, "offset"_a, "source"_a, "bytes"_a, "stream"_a, Released())
      .def("store", &HostMemory::store, "target"_a, "offset"_a, "bytes"_a, "stream"_a, Released())
      .def("mark", &HostMemory::mark, "index"_a, "value"_a, "stream"_a, Released())
      .def("marked", &HostMemory::marked, "index"_a, "value"_a, "seconds"_a, Released());
  m.def("be_patient", &be_patient, "seconds"_a);
  m.def("settle", [](int64_t device, double seconds) {
    if (!(seconds >= 0)) throw std::invalid_argument("seconds is " + std::to_string(seconds) + "; allowed: 0 and more");
    return settle(Device::get(device), static_cast<int64_t>(std::min(seconds, 1e9) * 1e9));
  }, "device"_a, "seconds"_a, Released());
  m.def("order", &order, "from_stream"_a, "to_stream"_a, Released());
  m.def("copy", &copy, "target"_a, "source"_a, "bytes"_a, "stream"_a, Released());
}

nb::dict overdue_dict(const OverdueWait& w) {
  nb::dict d;
  d["k"] = w.k;
  d["seq"] = w.seq;
  d["tag"] = w.tag;
  d["counter"] = w.wait.counter;
  d["writer"] = w.wait.writer;
  d["expected"] = w.wait.expected;
  d["seen"] = w.seen < 0 ? nb::object(nb::none()) : nb::object(nb::int_(w.seen));
  d["blocked_s"] = w.blocked_s;
  return d;
}

void bind_control(nb::module_& m) {
  nb::class_<ControlHandle>(m, "Control")
      .def_static("control_bytes", &Control::control_bytes, "ranks"_a, "counters"_a)
      .def("__init__", [](ControlHandle* self, int64_t device, int64_t ranks, int64_t rank, int64_t counters,
                          const MappingHandle& own, const std::vector<std::optional<MappingHandle>>& peers) {
        std::vector<std::shared_ptr<Mapping>> maps;
        for (const auto& p : peers) maps.push_back(p ? p->it : nullptr);
        nb::gil_scoped_release release;
        new (self) ControlHandle{
            std::make_shared<Control>(device, ranks, rank, counters, own.it, std::move(maps))};
      }, "device"_a, "ranks"_a, "rank"_a, "counters"_a, "own"_a, "peers"_a)
      .def_static("in_host_memory", [](int64_t device, int64_t ranks, int64_t rank, int64_t counters) {
        return ControlHandle{std::make_shared<Control>(device, ranks, rank, counters)};
      }, "device"_a, "ranks"_a, "rank"_a, "counters"_a, Released())
      .def("deliver", [](const ControlHandle& c, int64_t counter, int64_t writer, uint32_t total) {
        c.it->deliver(counter, writer, total);
      }, "counter"_a, "writer"_a, "total"_a)
      .def("delivered", [](const ControlHandle& c, int64_t counter, int64_t writer, uint32_t total, double seconds) {
        return c.it->delivered(counter, writer, total, seconds);
      }, "counter"_a, "writer"_a, "total"_a, "seconds"_a, Released())
      .def_prop_ro("device", [](const ControlHandle& c) { return c.it->device().ordinal(); })
      .def_prop_ro("ranks", [](const ControlHandle& c) { return c.it->ranks(); })
      .def_prop_ro("rank", [](const ControlHandle& c) { return c.it->rank(); })
      .def_prop_ro("counters", [](const ControlHandle& c) { return c.it->counters(); })
      .def_prop_ro("pinned_bytes", [](const ControlHandle& c) { return c.it->pinned_bytes(); })
      .def("outstanding", [](const ControlHandle& c) { return c.it->outstanding(); }, Released())
      .def("overdue", [](const ControlHandle& c, double seconds) {
        std::vector<OverdueWait> found;
        {
          nb::gil_scoped_release release;
          found = c.it->overdue(seconds);
        }
        nb::list list;
        for (const OverdueWait& w : found) list.append(overdue_dict(w));
        return list;
      }, "seconds"_a)
      .def("release_after", [](const ControlHandle& c, double seconds) { c.it->release_after(seconds); },
           "seconds"_a, Released())
      .def("release", [](const ControlHandle& c) { return c.it->release(); }, Released())
      .def_prop_ro("released", [](const ControlHandle& c) { return c.it->released(); });
}

// The device whose context is current here: the kernel was loaded into that.
int64_t current_device() {
  ContextHandle context = nullptr;
  check(api().CtxGetCurrent(&context), "cuCtxGetCurrent");
  if (context == nullptr)
    throw std::invalid_argument("no CUDA context is current: name the kernel's device, or make it current");
  DeviceId id = 0;
  check(api().CtxGetDevice(&id), "cuCtxGetDevice");
  return id;
}

size_t over_plans(const Program& program, size_t (SumPlan::*count)() const) {
  size_t total = 0;
  for (const auto& plan : program.sum_plans())
    if (plan != nullptr) total += (plan.get()->*count)();
  return total;
}

void bind_program(nb::module_& m) {
  nb::class_<Call>(m, "Call")
      .def_prop_ro("seq", &Call::seq)
      .def("enqueue", [](const Call& call, int64_t stream_index, uint64_t cuda_stream) {
        if (stream_index < 0 || stream_index >= static_cast<int64_t>(call.n_streams()))
          throw std::invalid_argument("stream_index is " + std::to_string(stream_index) + "; the program has " +
                                      std::to_string(call.n_streams()) + " streams");
        call.enqueue(static_cast<size_t>(stream_index), cuda_stream);
      }, "stream_index"_a, "cuda_stream"_a, Released())
      .def("enqueue_lanes", &Call::enqueue_lanes, "cuda_streams"_a, Released());
  nb::class_<ProgramHandle>(m, "Program")
      .def("__init__", [](ProgramHandle* self, const nb::bytes& ops, const nb::bytes& sources,
                          std::vector<std::pair<int64_t, int64_t>> streams, int64_t n_bases, int64_t n_counters,
                          const std::vector<std::tuple<int64_t, int64_t, int64_t>>& advance,
                          const std::vector<int64_t>& readers, std::vector<int64_t> lanes) {
        tide::Program::Parts parts{view(ops), view(sources), std::move(streams), n_bases, n_counters, {}};
        for (const auto& [counter, writer, amount] : advance) parts.advance.push_back({counter, writer, amount});
        new (self) ProgramHandle{std::make_shared<Program>(parts, readers, std::move(lanes))};
      }, "ops"_a, "sources"_a, "streams"_a, "n_bases"_a, "n_counters"_a, "advance"_a, "readers"_a = nb::list(),
         "lanes"_a = nb::list())
      .def_prop_ro("n_ops", [](const ProgramHandle& p) { return p.it->table().ops().size(); })
      .def_prop_ro("n_streams", [](const ProgramHandle& p) { return p.it->n_streams(); })
      .def("segments", [](const ProgramHandle& p, int64_t stream) {
        if (stream < 0 || stream >= static_cast<int64_t>(p.it->n_streams()))
          throw std::invalid_argument("stream is " + std::to_string(stream) + "; the program has " +
                                      std::to_string(p.it->n_streams()));
        static const char* const names[] = {"copies", "clear", "signals", "sums"};
        std::vector<std::pair<std::string, size_t>> out;
        for (const Segment& s : p.it->segments(static_cast<size_t>(stream)))
          out.emplace_back(names[s.kind], s.kind == Segment::kSums ? p.it->sums()[s.first].ops.size() : s.count);
        return out;
      }, "stream"_a)
      .def("set_sum_kernel", [](const ProgramHandle& p, uint64_t function, int64_t threads, int64_t shared_bytes,
                                int64_t ctas, int64_t max_pointers, int64_t tile, int64_t extra_null_pointers,
                                std::optional<int64_t> device, int64_t kind) {
        const auto kinds = static_cast<int64_t>(p.it->sum_kinds().size());
        if (kind < 0 || kind >= kinds)
          throw std::invalid_argument("kind is " + std::to_string(kind) + "; the program has " +
                                      std::to_string(kinds) + " kinds of sums");
        Device& d = Device::get(device ? *device : current_device());
        p.it->set_sum_kernel({function, threads, shared_bytes, ctas, max_pointers, tile, extra_null_pointers},
                             static_cast<size_t>(kind), d);
      }, "function"_a, "threads"_a, "shared_bytes"_a, "ctas"_a, "max_pointers"_a, "tile"_a,
         "extra_null_pointers"_a, "device"_a = nb::none(), "kind"_a = 0, Released())
      .def_prop_ro("sum_kinds", [](const ProgramHandle& p) {
        std::vector<std::tuple<bool, int64_t, int64_t, int64_t, bool>> out;
        for (const SumKind& k : p.it->sum_kinds())
          out.emplace_back(k.landing, k.sources, k.src_dtype, k.dst_dtype, k.accumulate);
        return out;
      })
      .def_prop_ro("sum_launches", [](const ProgramHandle& p) { return over_plans(*p.it, &SumPlan::n_launches); })
      .def_prop_ro("sum_tiles", [](const ProgramHandle& p) { return over_plans(*p.it, &SumPlan::n_tiles); })
      .def("begin", [](const ProgramHandle& p, const ControlHandle& control, std::vector<uint64_t> bases,
                       std::vector<uint32_t> counters, int64_t tag, double divisor) {
        if (tag < 0 || tag > UINT32_MAX)
          throw std::invalid_argument("tag must fit 32 unsigned bits; got " + std::to_string(tag));
        return Call(control.it, p.it, std::move(bases), std::move(counters), static_cast<uint32_t>(tag),
                    static_cast<float>(divisor));
      }, "control"_a, "bases"_a, "counters"_a, "tag"_a, "divisor"_a, Released());
}

}  // namespace

void bind(nb::module_& m) {
  m.def("probe", &probe_dict);
  m.def("device_info", &device_info, "ordinal"_a);
  m.def("can_access_peer", &can_access_peer, "a"_a, "b"_a, Released());
  bind_memory(m);
  bind_control(m);
  bind_program(m);
  bind_multimem(m);
}

}  // namespace tide::cuda
