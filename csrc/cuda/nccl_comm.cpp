#include "nccl_comm.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <thread>

#include "bounds.h"
#include "clock.h"
#include "error.h"
#include "multimem_object.h"
#include "stream.h"

namespace tide::nccl {
namespace {

constexpr double kAbortSeconds = 5.0;
constexpr double kTeardownSeconds = 2.0;
constexpr int64_t kSpinNs = 100'000;

// Runs f on a thread of its own; false, and f goes on by itself, if it takes longer. f must own what it uses.
bool within(double seconds, std::function<void()> f) {
  const auto done = std::make_shared<std::atomic<bool>>(false);
  std::thread([done, f = std::move(f)] {
    f();
    *done = true;
  }).detach();
  const int64_t deadline = deadline_after(seconds);
  for (int64_t pause = 20'000; !*done; pause = std::min<int64_t>(2 * pause, 1'000'000)) {
    if (now_ns() >= deadline) return false;
    sleep_ns(pause);
  }
  return true;
}

// A time that is 0 again at the end of the scope.
struct Since {
  explicit Since(std::atomic<int64_t>& ns) : ns(ns) { ns = now_ns(); }
  ~Since() { ns = 0; }
  Since(const Since&) = delete;
  Since& operator=(const Since&) = delete;
  std::atomic<int64_t>& ns;
};

Config config_of(const Limits& limits, bool blocking) {
  Config c;
  c.blocking = blocking ? 1 : 0;
  c.min_ctas = c.max_ctas = static_cast<int>(limits.channels);
  c.comm_name = "tide";
  c.graph_usage_mode = 0;
  c.num_rma_ctx = static_cast<int>(limits.contexts);
  if (limits.contexts > 0) {
    c.num_rma_sig = static_cast<int>(limits.signals);
    c.rma_eager_init = 1;
  }
  return c;
}

void check_limits(const Limits& limits) {
  between("contexts", limits.contexts, 0, 64);
  between("signals", limits.signals, 1, 1 << 20);
  between("channels", limits.channels, 1, 32);
}

// NCCL 2.31 makes multicast objects by itself, when windows are registered, unless its own variable says no.
void forbid_multicast(bool wanted) {
  const std::string off = wanted ? cuda::multicast_switched_off() : "the configuration has multicast: off";
  const char* own = std::getenv("NCCL_NVLS_ENABLE");
  if (!off.empty() && (own == nullptr || *own == '\0' || std::strtoll(own, nullptr, 0) != 0))
    throw NcclError("multicast is switched off (" + off +
                    "), but NCCL would use it: set NCCL_NVLS_ENABLE=0 in the environment of the job as well");
}

}  // namespace

int64_t deadline_after(double seconds) {
  if (!(seconds > 0) || !std::isfinite(seconds))
    throw std::invalid_argument("timeout_s must be a positive number; got " + std::to_string(seconds));
  return now_ns() + static_cast<int64_t>(std::min(seconds, 1e9) * 1e9);
}

std::string Communicator::unique_id() {
  UniqueId id;
  check(api().GetUniqueId(&id), "ncclGetUniqueId");
  return {id.internal, sizeof id.internal};
}

std::shared_ptr<Communicator> Communicator::join(int64_t device, const std::string& id, int64_t ranks, int64_t rank,
                                                 const Limits& limits, bool multicast, double timeout_s) {
  if (id.size() != kUniqueIdBytes)
    throw std::invalid_argument("an id has " + std::to_string(kUniqueIdBytes) + " bytes; got " +
                                std::to_string(id.size()));
  between("ranks", ranks, 1, 1 << 20);
  between("rank", rank, 0, ranks - 1);
  check_limits(limits);
  const int64_t deadline = deadline_after(timeout_s);
  (void)api();  // where there is no NCCL, that is the first thing to say
  forbid_multicast(multicast);
  cuda::Device& where = cuda::Device::get(device);
  std::shared_ptr<Communicator> comm(new Communicator(where, limits, false));
  UniqueId unique;
  std::memcpy(unique.internal, id.data(), sizeof unique.internal);
  Config config = config_of(limits, false);
  {
    const cuda::Current current(where);
    const Result r =
        api().CommInitRankConfig(comm->handle_, static_cast<int>(ranks), unique, static_cast<int>(rank), &config);
    comm->settle(r, "ncclCommInitRankConfig", *comm->handle_, deadline);
  }
  comm->query();
  if (comm->properties_.multimem && (!multicast || !cuda::multicast_switched_off().empty())) {
    comm->abort();
    throw NcclError("multicast is switched off, but this process's NCCL read its settings before and would use it: "
                    "set NCCL_NVLS_ENABLE=0 in the environment of the job, before it starts");
  }
  return comm;
}

std::shared_ptr<Communicator> Communicator::split(int64_t color, int64_t key, const Limits& limits, double timeout_s) {
  between("color", color, 0, INT_MAX);
  between("key", key, 0, INT_MAX);
  check_limits(limits);
  const int64_t deadline = deadline_after(timeout_s);
  std::shared_ptr<Communicator> child(new Communicator(device_, limits, true));
  run("ncclCommSplit", deadline, Peers::kMeets,
      [color, key, handle = child->handle_, config = config_of(limits, true)](CommHandle comm) mutable {
        return api().CommSplit(comm, static_cast<int>(color), static_cast<int>(key), handle, &config);
      });
  if (*child->handle_ == nullptr) throw NcclError("ncclCommSplit gave no communicator");
  child->settle(kInProgress, "ncclCommSplit", *child->handle_, deadline);
  child->query();
  return child;
}

// The words of a timeout name the call; who is missing is known to the ranks, not to NCCL.
void Communicator::go_on(const char* call, int64_t deadline_ns) {
  if (stopping_) throw NcclError(std::string(call) + ": the communicator was aborted");
  if (now_ns() < deadline_ns) return;
  if (!stopping_.exchange(true)) give_up();
  throw OsError(ETIMEDOUT, std::string(call) + " was not through in time: not every rank took part, or one cannot be "
                                               "reached; the communicator was aborted");
}

void Communicator::settle(Result result, const char* call, CommHandle comm, int64_t deadline_ns) {
  const int64_t begun = now_ns();
  for (int64_t pause = 0; result == kInProgress;) {
    go_on(call, deadline_ns);
    // What is enqueued on a stream takes microseconds; the shortest sleep takes fifty.
    if (now_ns() - begun > kSpinNs) sleep_ns(pause = std::clamp<int64_t>(2 * pause, 20'000, 1'000'000));
    Result state = kSuccess;
    check(api().CommGetAsyncError(comm, &state), "ncclCommGetAsyncError", comm);
    result = state;
  }
  check(result, call, comm);
}

void Communicator::query() {
  check(api().CommQueryProperties(*handle_, &properties_), "ncclCommQueryProperties", *handle_);
}

Result Communicator::elsewhere(const char* call, int64_t deadline_ns, const std::function<Result(CommHandle)>& f) {
  struct Outcome {
    std::atomic<bool> known{false};
    Result result = kSuccess;
    std::exception_ptr error;
  };
  const auto outcome = std::make_shared<Outcome>();
  std::thread([outcome, f, comm = *handle_, &device = device_] {
    try {
      const cuda::Current current(device);
      outcome->result = f(comm);
    } catch (...) {
      outcome->error = std::current_exception();
    }
    outcome->known = true;
  }).detach();
  for (int64_t pause = 20'000; !outcome->known; pause = std::min<int64_t>(2 * pause, 1'000'000)) {
    go_on(call, deadline_ns);
    sleep_ns(pause);
  }
  if (outcome->error) std::rethrow_exception(outcome->error);
  return outcome->result;
}

double Communicator::in_call_s() const {
  const int64_t since = in_call_since_ns_;
  return since == 0 ? 0 : static_cast<double>(now_ns() - since) / 1e9;
}

void Communicator::run(const char* call, int64_t deadline_ns, Peers peers,
                       const std::function<Result(CommHandle)>& f) {
  std::unique_lock<std::timed_mutex> hold(lock_, std::defer_lock);
  while (!hold.try_lock_for(std::chrono::milliseconds(20)))
    if (stopping_ || now_ns() >= deadline_ns)
      throw OsError(ETIMEDOUT, std::string(call) + ": another call of the same communicator is not through");
  if (closed()) throw NcclError(std::string(call) + ": the communicator was closed or aborted");
  const cuda::Current current(device_);
  const CommHandle comm = *handle_;
  Result r = kSuccess;
  if (blocking_ && peers == Peers::kMeets) {
    r = elsewhere(call, deadline_ns, f);
  } else {
    const Since since(in_call_since_ns_);
    r = f(comm);
  }
  // Registration says that it is through when a thread of NCCL's has only been given it.
  settle(r == kSuccess ? kInProgress : r, call, comm, deadline_ns);
}

void Communicator::close(double timeout_s) {
  if (closed()) return;
  try {
    run("ncclCommFinalize", deadline_after(timeout_s), Peers::kMeets,
        [](CommHandle comm) { return api().CommFinalize(comm); });
  } catch (...) {
    abort();
    throw;
  }
  stopping_ = true;
  CommHandle comm = *handle_;
  cuda::Device& device = device_;
  if (within(kAbortSeconds, [comm, &device] {
        const cuda::Current current(device);
        (void)api().CommDestroy(comm);
      }))
    *handle_ = nullptr;
}

void Communicator::abort() {
  if (*handle_ == nullptr || stopping_.exchange(true)) return;
  // Whoever is in run() sees that and leaves, unless NCCL does not return: then this is what makes it.
  std::unique_lock<std::timed_mutex> hold(lock_, std::defer_lock);
  (void)hold.try_lock_for(std::chrono::seconds(1));
  give_up();
}

void Communicator::give_up() {
  CommHandle comm = *handle_;
  cuda::Device& device = device_;
  // If NCCL does not come back from this either, it keeps what it has: the process is about to end.
  if (within(kAbortSeconds, [comm, &device] {
        const cuda::Current current(device);
        (void)api().CommAbort(comm);
      }))
    *handle_ = nullptr;
}

Communicator::~Communicator() {
  try {
    abort();
  } catch (const std::exception&) {
    // The driver is going down.
  }
  if (*handle_ == nullptr) delete handle_;  // else NCCL may still use it
}

Memory::Memory(int64_t device, int64_t bytes) : device_(cuda::Device::get(device)) {
  bytes_ = device_.whole_granules(bytes);
  const cuda::Current current(device_);
  const Result r = api().MemAlloc(&address_, bytes_);
  if (r != kSuccess)
    throw OsError(ENOMEM, "device " + std::to_string(device) + " has no " + std::to_string(bytes_) +
                              " bytes to register (ncclMemAlloc: " + describe(r, nullptr) +
                              "); memory that torch caches can be given back with torch.cuda.empty_cache()");
}

Memory::~Memory() {
  try {
    if (!cuda::settle_for_teardown(device_)) return;  // leaks rather than pull it from under running copies
    void* address = address_;
    cuda::Device& device = device_;
    (void)within(kTeardownSeconds, [address, &device] {
      const cuda::Current current(device);
      (void)api().MemFree(address);
    });
  } catch (const std::exception&) {
  }
}

Window::Window(std::shared_ptr<Communicator> comm, Region region, double timeout_s)
    : comm_(std::move(comm)), region_(std::move(region)) {
  if (region_.device != comm_->device().ordinal())
    throw std::invalid_argument("the memory is on device " + std::to_string(region_.device) +
                                "; the communicator on " + std::to_string(comm_->device().ordinal()));
  using Peers = Communicator::Peers;
  comm_->run("ncclCommWindowRegister", deadline_after(timeout_s), Peers::kMeets,
             [region = region_, handle = handle_](CommHandle c) {
               return api().CommWindowRegister(c, reinterpret_cast<void*>(region.address), region.bytes, handle,
                                               kCollSymmetric);
             });
  if (*handle_ != nullptr) return;
  // NCCL reports success and gives no window where it cannot have symmetric memory.
  const Properties& p = comm_->properties();
  const std::string why =
      p.lsa_teams > 1 ? "its ranks are on " + std::to_string(p.lsa_teams) + " hosts without an RDMA network that NCCL "
                        "can use for windows (NCCL_DEBUG=INFO tells more)"
                      : "its GPUs cannot all reach each other, or NCCL_CUMEM_ENABLE=0 or NCCL_WIN_ENABLE=0 is set";
  throw NcclError("ncclCommWindowRegister gave no window to a communicator of " + std::to_string(p.ranks) +
                  " ranks: " + why);
}

void Window::close(double timeout_s) {
  if (*handle_ == nullptr) return;
  WindowHandle handle = *handle_;
  *handle_ = nullptr;
  if (comm_->closed()) return;  // gone with it
  comm_->run("ncclCommWindowDeregister", deadline_after(timeout_s), Communicator::Peers::kMeets,
             [handle](CommHandle comm) { return api().CommWindowDeregister(comm, handle); });
}

Window::~Window() {
  try {
    close(kTeardownSeconds);
  } catch (const std::exception&) {
  }
  // handle_ itself is never freed: a registration that was given up may still write it.
}

uint64_t Window::peer_address(int64_t peer) {
  between("peer", peer, 0, comm_->ranks() - 1);
  if (*handle_ == nullptr) throw NcclError("the window was closed");
  void* address = nullptr;
  check(api().GetPeerDevicePointer(*handle_, 0, static_cast<int>(peer), &address), "ncclGetPeerDevicePointer");
  return reinterpret_cast<uint64_t>(address);
}

}  // namespace tide::nccl
