// Python bindings of the native core. Documented in tide_strategies/_native.pyi.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <unistd.h>
#include <sys/syscall.h>

#include <array>
#include <cmath>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "arena.h"
#include "clock.h"
#include "cuda/module.h"
#include "cuda/nccl_module.h"
#include "error.h"
#include "kernels.h"
#include "memory_limit.h"
#include "program.h"
#include "tensor.h"
#include "window.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace tide {
namespace {

// What Python holds: calls keep their arena and program alive through these.
struct ArenaHandle {
  std::shared_ptr<Arena> arena;
};
struct ProgramHandle {
  std::shared_ptr<const Program> program;
};

std::string_view view(const nb::bytes& b) { return {static_cast<const char*>(b.data()), b.size()}; }

// Python runs signal handlers on its main thread only; other threads need not ask for the GIL.
void poll_python_signals() {
  if (::syscall(SYS_gettid) != ::getpid()) return;
  nb::gil_scoped_acquire hold;
  if (PyErr_CheckSignals() != 0) throw nb::python_error();
}

int64_t deadline_after(double timeout_s) {
  if (!std::isfinite(timeout_s) || timeout_s < 0 || timeout_s > 1e9)
    throw std::invalid_argument("timeout_s must be between 0 and 1e9 seconds; got " + std::to_string(timeout_s));
  return now_ns() + static_cast<int64_t>(timeout_s * 1e9);
}

const char* status_name(Status status) {
  switch (status) {
    case Status::kOk: return "ok";
    case Status::kTimeout: return "timeout";
    case Status::kPeerDead: return "peer_dead";
    case Status::kAborted: return "aborted";
    case Status::kMismatch: return "mismatch";
  }
  return "unknown";
}

Call begin(const ProgramHandle& self, const ArenaHandle& arena, std::vector<uint64_t> bases,
           std::vector<uint32_t> counters, int64_t tag, double divisor) {
  if (tag < 0 || tag > UINT32_MAX)
    throw std::invalid_argument("tag must fit 32 unsigned bits; got " + std::to_string(tag));
  return Call(arena.arena, self.program, std::move(bases), std::move(counters), static_cast<uint32_t>(tag),
              static_cast<float>(divisor));
}

using Tensor = nb::ndarray<nb::array_api, nb::ndim<1>, nb::device::cpu, nb::c_contig>;

// A tensor over part of a Window or Mapping. It owns a reference to that object, so the memory stays.
template <class View>
Tensor tensor_of(nb::pointer_and_handle<View> self, int64_t byte_offset, int64_t numel, const std::string& name) {
  const nb::dlpack::dtype dtype = dtype_from_name(name);
  check_within(byte_offset, numel, dtype, name, self.p->bytes());
  const auto shape = static_cast<size_t>(numel);
  return Tensor(reinterpret_cast<void*>(self.p->address() + static_cast<uint64_t>(byte_offset)), 1, &shape, self.h,
                nullptr, dtype, nb::device::cpu::value, 0);
}

void deliver_checked(ArenaHandle& a, int64_t counter, int64_t writer, int64_t amount, int64_t seq, int64_t tag) {
  const auto within = [](const char* name, int64_t value, int64_t most) {
    if (value < 0 || value > most)
      throw std::invalid_argument(std::string(name) + " is " + std::to_string(value) + "; allowed: 0 to " +
                                  std::to_string(most));
    return static_cast<uint32_t>(value);
  };
  Arena& arena = *a.arena;
  deliver(arena, within("counter", counter, int64_t{arena.counters()} - 1),
          within("writer", writer, int64_t{arena.ranks()} - 1), within("amount", amount, INT32_MAX),
          within("seq", seq, UINT32_MAX), within("tag", tag, UINT32_MAX));
}

void bind_arena(nb::module_& m) {
  nb::class_<ArenaHandle>(m, "Arena")
      .def_static("create", [](int64_t ranks, int64_t rank, int64_t counters) {
        return ArenaHandle{Arena::create(ranks, rank, counters)};
      }, "ranks"_a, "rank"_a, "counters"_a)
      .def_static("attach", [](int fd, int64_t ranks, int64_t rank, int64_t counters) {
        return ArenaHandle{Arena::attach(fd, ranks, rank, counters)};
      }, "fd"_a, "ranks"_a, "rank"_a, "counters"_a)
      .def_static("available_bytes", [](const std::string& proc) {
        const uint64_t bytes = available_bytes(proc);
        return static_cast<int64_t>(std::min<uint64_t>(bytes, INT64_MAX));
      }, "proc"_a = "/proc", nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("fd", [](const ArenaHandle& a) { return a.arena->fd(); })
      .def_prop_ro("ranks", [](const ArenaHandle& a) { return a.arena->ranks(); })
      .def_prop_ro("rank", [](const ArenaHandle& a) { return a.arena->rank(); })
      .def_prop_ro("counters", [](const ArenaHandle& a) { return a.arena->counters(); })
      .def_prop_ro("control_bytes", [](const ArenaHandle& a) { return a.arena->control_bytes(); })
      .def_prop_ro("bytes", [](const ArenaHandle& a) { return a.arena->bytes(); })
      .def_prop_ro("allocated_bytes", [](const ArenaHandle& a) { return a.arena->allocated_bytes(); })
      .def("reserve", [](ArenaHandle& a, int64_t offset, int64_t bytes) { a.arena->reserve(offset, bytes); },
           "offset"_a, "bytes"_a, nb::call_guard<nb::gil_scoped_release>())
      .def("release", [](ArenaHandle& a, int64_t offset, int64_t bytes) { a.arena->release(offset, bytes); },
           "offset"_a, "bytes"_a, nb::call_guard<nb::gil_scoped_release>())
      .def("watch", [](ArenaHandle& a, int64_t rank, int64_t pid) { a.arena->watch(rank, pid); },
           "rank"_a, "pid"_a)
      .def("lose", [](ArenaHandle& a, int64_t rank) { a.arena->lose(rank); }, "rank"_a)
      .def("deliver", &deliver_checked, "counter"_a, "writer"_a, "amount"_a = 1, "seq"_a = 0, "tag"_a = 0)
      .def("abort", [](ArenaHandle& a, int64_t code, const nb::bytes& message, int64_t rank) {
        return a.arena->abort(code, view(message), rank < 0 ? int64_t{a.arena->rank()} : rank);
      }, "code"_a, "message"_a, "rank"_a = -1)
      .def("aborted", [](const ArenaHandle& a) -> nb::object {
        const auto info = a.arena->aborted();
        if (!info) return nb::none();
        return nb::make_tuple(info->rank, info->code, nb::bytes(info->message.data(), info->message.size()));
      });
}

void bind_views(nb::module_& m) {
  nb::class_<Mapping>(m, "Mapping")
      .def("__init__", [](Mapping* self, const ArenaHandle& arena, int64_t offset, int64_t bytes) {
        new (self) Mapping(*arena.arena, offset, bytes);
      }, "arena"_a, "offset"_a, "bytes"_a, nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("address", &Mapping::address)
      .def_prop_ro("bytes", &Mapping::bytes)
      .def("tensor", &tensor_of<Mapping>, "byte_offset"_a, "numel"_a, "dtype"_a);
  nb::class_<Window>(m, "Window")
      .def(nb::init<int64_t>(), "bytes"_a)
      .def("map", [](Window& w, const ArenaHandle& arena, int64_t offset) { w.map(*arena.arena, offset); },
           "arena"_a, "offset"_a, nb::call_guard<nb::gil_scoped_release>())
      .def("poison", &Window::poison, nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("address", &Window::address)
      .def_prop_ro("bytes", &Window::bytes)
      .def("tensor", &tensor_of<Window>, "byte_offset"_a, "numel"_a, "dtype"_a);
}

std::string outcome_repr(const Outcome& o) {
  return std::string("Outcome(status='") + status_name(o.status) + "', op=" + std::to_string(o.op) +
         ", writer=" + std::to_string(o.writer) + ", counter=" + std::to_string(o.counter) +
         ", expected=" + std::to_string(o.expected) + ", seen=" + std::to_string(o.seen) +
         ", waited_s=" + std::to_string(o.waited_s) + ", peer_seq=" + std::to_string(o.peer_seq) +
         ", peer_tag=" + std::to_string(o.peer_tag) + ")";
}

void bind_program(nb::module_& m) {
  nb::class_<Outcome>(m, "Outcome")
      .def_prop_ro("status", [](const Outcome& o) { return status_name(o.status); })
      .def_ro("op", &Outcome::op)
      .def_ro("writer", &Outcome::writer)
      .def_ro("counter", &Outcome::counter)
      .def_ro("expected", &Outcome::expected)
      .def_ro("seen", &Outcome::seen)
      .def_ro("waited_s", &Outcome::waited_s)
      .def_ro("peer_seq", &Outcome::peer_seq)
      .def_ro("peer_tag", &Outcome::peer_tag)
      .def("__repr__", &outcome_repr);
  nb::class_<Call>(m, "Call")
      .def_prop_ro("seq", &Call::seq)
      .def("run", [](const Call& call, int64_t stream, double timeout_s) {
        if (stream < 0 || stream >= static_cast<int64_t>(call.n_streams()))
          throw std::invalid_argument("stream is " + std::to_string(stream) + "; the program has " +
                                      std::to_string(call.n_streams()));
        const int64_t deadline = deadline_after(timeout_s);
        nb::gil_scoped_release release;
        return call.run(static_cast<size_t>(stream), deadline, poll_python_signals);
      }, "stream"_a, "timeout_s"_a);
  nb::class_<ProgramHandle>(m, "Program")
      .def("__init__", [](ProgramHandle* self, const nb::bytes& ops, const nb::bytes& sources,
                          std::vector<std::pair<int64_t, int64_t>> streams, int64_t n_bases, int64_t n_counters,
                          const std::vector<std::tuple<int64_t, int64_t, int64_t>>& advance) {
        Program::Parts parts{view(ops), view(sources), std::move(streams), n_bases, n_counters, {}};
        for (const auto& [counter, writer, amount] : advance) parts.advance.push_back({counter, writer, amount});
        new (self) ProgramHandle{std::make_shared<const Program>(parts)};
      }, "ops"_a, "sources"_a, "streams"_a, "n_bases"_a, "n_counters"_a, "advance"_a)
      .def_prop_ro("n_ops", [](const ProgramHandle& p) { return p.program->ops().size(); })
      .def_prop_ro("n_streams", [](const ProgramHandle& p) { return p.program->streams().size(); })
      .def("begin", &begin, "arena"_a, "bases"_a, "counters"_a, "tag"_a, "divisor"_a)
      .def("replay", [](const ProgramHandle& self, const ArenaHandle& arena, std::vector<uint64_t> bases,
                        std::vector<uint32_t> counters, int64_t tag, double divisor, double timeout_s) {
        const int64_t deadline = deadline_after(timeout_s);
        const Call call = begin(self, arena, std::move(bases), std::move(counters), tag, divisor);
        nb::gil_scoped_release release;
        return call.run_all(deadline, poll_python_signals);
      }, "arena"_a, "bases"_a, "counters"_a, "tag"_a, "divisor"_a, "timeout_s"_a);
}

}  // namespace

NB_MODULE(_native, m) {
  nb::set_leak_warnings(false);  // at interpreter exit tensors may well outlive this module
  nb::register_exception_translator([](const std::exception_ptr& p, void*) {
    try {
      std::rethrow_exception(p);
    } catch (const OsError& e) {
      // From (errno, text) Python picks the subclass, such as ProcessLookupError.
      nb::object args = nb::make_tuple(e.code, e.what());
      PyErr_SetObject(PyExc_OSError, args.ptr());
    }
  });
  m.def("advise_huge", &advise_huge, "address"_a, "bytes"_a);
  m.def("kernel_variants", &kernel_variants);
  m.def("kernel_variant", [] { return std::string(kernels().name); });
  m.def("use_kernel_variant", &use_kernels, "name"_a);
  bind_arena(m);
  bind_views(m);
  bind_program(m);
  nb::module_ cuda_module = m.def_submodule("cuda", "The same over CUDA devices; needs no device to be imported.");
  cuda::bind(cuda_module);
  nb::module_ nccl_module = m.def_submodule("nccl", "The NCCL of this process, if it has one.");
  nccl::bind(nccl_module);
}

}  // namespace tide
