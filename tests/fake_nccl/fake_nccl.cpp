// A stand-in for libnccl.so.2 over the fake driver (tests/fake_cuda), for tests on machines without a GPU.
//
// All ranks live in one process, on threads or one after the other. It has only what the rails call, and is stricter
// than the real library where that catches mistakes. Every call of a non-blocking communicator answers as it may: "in
// progress" first, and the result when asked again. Those of a blocking one return when they are through.
// Functions named fake_* are for tests.
//
//   g++ -std=c++17 -O1 -shared -fPIC -pthread -Wl,-soname,libnccl.so.2 -o libnccl.so.2 fake_nccl.cpp
//
// Read when needed: FAKE_NCCL_VERSION (23102), FAKE_NCCL_NO_WINDOW (registrations give none), FAKE_NCCL_NO_RMA,
// FAKE_NCCL_MULTIMEM, FAKE_NCCL_HOSTS (1). Compiled with FAKE_NCCL_OLD it has no host RMA.
#include <dlfcn.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "../../csrc/cuda/nccl_types.h"

using namespace tide::nccl;

#define EXPORT extern "C" __attribute__((visibility("default")))
#ifdef FAKE_NCCL_OLD
#define RMA extern "C" __attribute__((visibility("hidden")))
#else
#define RMA EXPORT
#endif

namespace {

constexpr Result kInternalError = 3, kInvalidArgument = 4, kInvalidUsage = 5;

struct Group;
struct FakeWindow {
  struct FakeComm* comm;
  size_t index;
  char* memory;
  size_t bytes;
};
using Signal = std::tuple<int, int, int>;  // sender, signal, context
struct FakeComm {
  std::shared_ptr<Group> group;
  int rank = 0, contexts = 1, signals = 1;
  bool blocking = false, aborted = false, finalized = false;
  std::vector<std::unique_ptr<FakeWindow>> windows;
  size_t registering = 0;             // calls of CommWindowRegister
  WindowHandle* window_to = nullptr;  // where the last of them wants its handle
  size_t splits = 0;
  std::string pending;  // the call that is in progress
  std::map<Signal, std::unique_ptr<std::atomic<int64_t>>> come;
  std::map<Signal, int64_t> taken;
  std::shared_ptr<std::atomic<bool>> last = std::make_shared<std::atomic<bool>>(true);
};
struct Group {
  int ranks = 0;
  std::map<int, FakeComm*> joined;
  std::map<size_t, std::set<int>> splits;  // by round: the ranks that have come
};
struct World {
  std::mutex lock;
  std::map<std::string, std::shared_ptr<Group>> groups;
  std::set<FakeComm*> comms;
  std::map<void*, size_t> memory;
  std::map<std::string, std::pair<Result, int>> failures;  // what to return, after how many calls
  std::set<std::string> stuck;
  std::map<std::string, uint64_t> calls;
  uint64_t ids = 0;
  std::string last_config;
};
World& world() {
  static World* const w = new World;
  return *w;
}

bool is_set(const char* name) { return std::getenv(name) != nullptr; }

// What the call is made to return, if anything; counts it.
bool failing(const char* name, Result* result) {
  World& w = world();
  ++w.calls[name];
  const auto it = w.failures.find(name);
  if (it == w.failures.end() || it->second.second-- > 0) return false;
  *result = it->second.first;
  w.failures.erase(it);
  return true;
}

#define ENTER(name)                                 \
  std::unique_lock<std::mutex> hold(world().lock);  \
  if (Result failed; failing(name, &failed)) return failed

FakeComm* known(CommHandle handle) {
  auto* comm = static_cast<FakeComm*>(handle);
  return world().comms.count(comm) != 0 && !comm->aborted ? comm : nullptr;
}

// With contexts for puts they are connected at once: a blocking communicator would wait for peers in a put.
bool sound(const Config* c) {
  return c->size == sizeof(Config) && c->magic == kMagic && c->version == kVersion &&
         (c->blocking == 0 || c->blocking == 1) && (c->num_rma_ctx == 0 || c->rma_eager_init == 1) &&
         c->min_ctas == c->max_ctas && c->max_ctas >= 1;
}
void take(FakeComm* comm, const Config* c) {
  comm->contexts = c->num_rma_ctx == kUndefined ? 1 : c->num_rma_ctx;
  comm->signals = c->num_rma_sig == kUndefined ? 1 : c->num_rma_sig;
  comm->blocking = c->blocking == 1;
  world().last_config = "contexts=" + std::to_string(comm->contexts) + " channels=" + std::to_string(c->max_ctas) +
                        " blocking=" + std::to_string(c->blocking);
}

using Submit = int (*)(void*, void (*)(void*), void*);
Submit submit_to_stream() {
  static const Submit it = [] {
    void* driver = ::dlopen(std::getenv("TIDE_LIBCUDA"), RTLD_NOW);
    return reinterpret_cast<Submit>(::dlsym(driver, "fake_submit"));
  }();
  return it;
}
// As in the real library, what a communicator is given happens in that order, on whichever streams it is.
Result enqueue(FakeComm* comm, void* stream, std::function<void()> f) {
  if (stream == nullptr) return kInvalidArgument;
  auto before = comm->last, done = std::make_shared<std::atomic<bool>>(false);
  comm->last = done;
  auto* own = new std::function<void()>([before, done, f = std::move(f)] {
    while (!*before) std::this_thread::sleep_for(std::chrono::microseconds(100));
    f();
    *done = true;
  });
  const int r = submit_to_stream()(stream, [](void* p) {
    auto* work = static_cast<std::function<void()>*>(p);
    (*work)();
    delete work;
  }, own);
  return r == 0 ? kInProgress : kInvalidArgument;
}

std::atomic<int64_t>* cell(FakeComm* comm, const Signal& s) {
  auto& c = comm->come[s];
  if (c == nullptr) c = std::make_unique<std::atomic<int64_t>>(0);
  return c.get();
}
bool place(const FakeComm* comm, int peer, int signal, int context, unsigned flags) {
  return peer >= 0 && peer < comm->group->ranks && signal >= 0 && signal < comm->signals && context >= 0 &&
         context < comm->contexts && flags == 0;
}

// Whether every rank has done what this one waits for; then it is done here, too.
bool through(FakeComm* comm) {
  if (world().stuck.count(comm->pending) != 0) return false;
  if (comm->pending == "ncclCommInitRankConfig") return comm->group->joined.size() == size_t(comm->group->ranks);
  if (comm->pending == "ncclCommWindowRegister") {
    for (auto& [rank, peer] : comm->group->joined)
      if (peer->registering < comm->registering) return false;
    if (comm->window_to != nullptr) *comm->window_to = is_set("FAKE_NCCL_NO_WINDOW") ? nullptr : comm->windows.back().get();
    comm->window_to = nullptr;
  }
  if (comm->pending == "ncclCommSplit")
    return comm->group->splits[comm->splits].size() == size_t(comm->group->ranks);
  return true;
}

// What a call returns that has been given to the communicator: at once, or when it is through.
Result answer(FakeComm* comm, Result at_once, std::unique_lock<std::mutex>& hold) {
  if (!comm->blocking || (at_once != kSuccess && at_once != kInProgress)) return at_once;
  while (!comm->aborted && !through(comm)) {
    hold.unlock();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    hold.lock();
  }
  return comm->aborted ? kInternalError : kSuccess;
}

}  // namespace

// --- for tests ---

EXPORT void fake_nccl_fail(const char* name, int result, int after) {
  std::lock_guard<std::mutex> hold(world().lock);
  world().failures[name] = {result, after};
}
EXPORT void fake_nccl_stick(const char* name, int stuck) {
  std::lock_guard<std::mutex> hold(world().lock);
  if (stuck != 0) world().stuck.insert(name);
  else world().stuck.erase(name);
}
EXPORT uint64_t fake_nccl_calls(const char* name) {
  std::lock_guard<std::mutex> hold(world().lock);
  return world().calls[name];
}
EXPORT uint64_t fake_nccl_open() {
  std::lock_guard<std::mutex> hold(world().lock);
  uint64_t n = world().memory.size();
  for (const FakeComm* c : world().comms) n += c->aborted ? 0 : 1;
  return n;
}
EXPORT const char* fake_nccl_last_config() { return world().last_config.c_str(); }

// --- NCCL ---

EXPORT Result ncclGetVersion(int* version) {
  const char* stated = std::getenv("FAKE_NCCL_VERSION");
  *version = stated != nullptr ? std::atoi(stated) : 23102;
  return kSuccess;
}
EXPORT const char* ncclGetErrorString(Result r) {
  return r == kInvalidUsage ? "invalid usage" : r == kInvalidArgument ? "invalid argument" : "unhandled cuda error";
}
EXPORT const char* ncclGetLastError(CommHandle) { return "the fake library refused\n"; }
EXPORT Result ncclGetUniqueId(UniqueId* id) {
  ENTER("ncclGetUniqueId");
  std::memset(id, 0, sizeof *id);
  const uint64_t n = ++world().ids;
  std::memcpy(id->internal, &n, sizeof n);
  return kSuccess;
}
EXPORT Result ncclCommInitRankConfig(CommHandle* out, int ranks, UniqueId id, int rank, Config* config) {
  ENTER("ncclCommInitRankConfig");
  if (!sound(config) || config->blocking != 0 || rank < 0 || rank >= ranks) return kInvalidArgument;
  auto& group = world().groups[std::string(id.internal, sizeof id.internal)];
  if (group == nullptr) group = std::make_shared<Group>();
  group->ranks = ranks;
  auto* comm = new FakeComm;
  comm->group = group;
  comm->rank = rank;
  comm->pending = "ncclCommInitRankConfig";
  take(comm, config);
  group->joined[rank] = comm;
  world().comms.insert(comm);
  *out = comm;
  return kInProgress;
}
EXPORT Result ncclCommSplit(CommHandle parent, int color, int key, CommHandle* out, Config* config) {
  ENTER("ncclCommSplit");
  FakeComm* comm = known(parent);
  if (comm == nullptr || !sound(config)) return kInvalidArgument;
  auto* child = new FakeComm;
  take(child, config);
  ++comm->splits;
  comm->group->splits[comm->splits].insert(comm->rank);
  // Colours meet in a group named by the parent's, the round and the colour; keys are the ranks in it.
  auto& group = world().groups["split " + std::to_string(reinterpret_cast<uintptr_t>(comm->group.get())) + " " +
                               std::to_string(comm->splits) + " " + std::to_string(color)];
  if (group == nullptr) group = std::make_shared<Group>();
  child->group = group;
  child->rank = key;
  group->joined[key] = child;
  group->ranks = static_cast<int>(group->joined.size());
  world().comms.insert(child);
  comm->pending = "ncclCommSplit";
  *out = child;
  return kInProgress;
}
EXPORT Result ncclCommGetAsyncError(CommHandle handle, Result* state) {
  ENTER("ncclCommGetAsyncError");
  FakeComm* comm = known(handle);
  if (comm == nullptr) return kInvalidArgument;
  *state = through(comm) ? kSuccess : kInProgress;
  return kSuccess;
}
EXPORT Result ncclCommQueryProperties(CommHandle handle, Properties* p) {
  ENTER("ncclCommQueryProperties");
  FakeComm* comm = known(handle);
  if (comm == nullptr || p->size != sizeof *p || p->magic != kMagic || p->version != kVersion) return kInvalidArgument;
  p->rank = comm->rank;
  p->ranks = comm->group->ranks;
  p->host_rma = comm->contexts > 0 && !is_set("FAKE_NCCL_NO_RMA");
  p->multimem = is_set("FAKE_NCCL_MULTIMEM");
  p->lsa_teams = is_set("FAKE_NCCL_HOSTS") ? std::atoi(std::getenv("FAKE_NCCL_HOSTS")) : 1;
  return kSuccess;
}
EXPORT Result ncclCommAbort(CommHandle handle) {
  ENTER("ncclCommAbort");
  FakeComm* comm = known(handle);
  if (comm == nullptr) return kInvalidArgument;
  comm->aborted = true;  // stays for streams that still use its cells
  return kSuccess;
}
EXPORT Result ncclCommFinalize(CommHandle handle) {
  ENTER("ncclCommFinalize");
  FakeComm* comm = known(handle);
  if (comm == nullptr) return kInvalidArgument;
  for (const auto& w : comm->windows)
    if (w->memory != nullptr) return kInvalidUsage;  // a window is still registered
  comm->finalized = true;
  comm->pending = "ncclCommFinalize";
  return answer(comm, kInProgress, hold);
}
EXPORT Result ncclCommDestroy(CommHandle handle) {
  ENTER("ncclCommDestroy");
  FakeComm* comm = known(handle);
  if (comm == nullptr || !comm->finalized) return kInvalidUsage;
  comm->aborted = true;
  return kSuccess;
}
EXPORT Result ncclMemAlloc(void** out, size_t bytes) {
  ENTER("ncclMemAlloc");
  *out = std::aligned_alloc(2 << 20, bytes);
  std::memset(*out, 0, bytes);
  world().memory[*out] = bytes;
  return kSuccess;
}
EXPORT Result ncclMemFree(void* p) {
  ENTER("ncclMemFree");
  if (world().memory.erase(p) == 0) return kInvalidArgument;
  std::free(p);
  return kSuccess;
}
EXPORT Result ncclCommWindowRegister(CommHandle handle, void* buffer, size_t bytes, WindowHandle* out, int flags) {
  ENTER("ncclCommWindowRegister");
  FakeComm* comm = known(handle);
  const auto memory = world().memory.find(buffer);  // a whole allocation, as host RMA wants it; or the driver's
  const bool whole = memory == world().memory.end() || memory->second == bytes;
  if (comm == nullptr || flags != kCollSymmetric || !whole || reinterpret_cast<uintptr_t>(buffer) % (2 << 20) != 0)
    return kInvalidArgument;
  comm->windows.push_back(std::make_unique<FakeWindow>(
      FakeWindow{comm, comm->windows.size(), static_cast<char*>(buffer), bytes}));
  ++comm->registering;
  comm->window_to = out;
  comm->pending = "ncclCommWindowRegister";
  return answer(comm, kSuccess, hold);  // as NCCL does, though it is not through
}
EXPORT Result ncclCommWindowDeregister(CommHandle handle, WindowHandle window) {
  ENTER("ncclCommWindowDeregister");
  FakeComm* comm = known(handle);
  auto* w = static_cast<FakeWindow*>(window);
  if (comm == nullptr || w->comm != comm || w->memory == nullptr) return kInvalidArgument;
  w->memory = nullptr;
  comm->pending = "ncclCommWindowDeregister";
  return answer(comm, kSuccess, hold);
}
EXPORT Result ncclGetPeerDevicePointer(WindowHandle window, size_t offset, int peer, void** out) {
  ENTER("ncclGetPeerDevicePointer");
  auto* w = static_cast<FakeWindow*>(window);
  if (offset >= w->bytes) return kInvalidArgument;
  *out = w->comm->group->joined.at(peer)->windows.at(w->index)->memory + offset;
  return kSuccess;
}
RMA Result ncclPutSignal(const void* source, size_t count, int type, int peer, WindowHandle window, size_t offset,
                            int signal, int context, unsigned flags, CommHandle handle, StreamHandle stream) {
  ENTER("ncclPutSignal");
  FakeComm* comm = known(handle);
  auto* w = static_cast<FakeWindow*>(window);
  if (comm == nullptr || type != kInt8 || !place(comm, peer, signal, context, flags)) return kInvalidArgument;
  if (w->comm != comm || w->memory == nullptr || offset + count > w->bytes) return kInvalidArgument;
  bool registered = false;
  const char* from = static_cast<const char*>(source);
  for (const auto& own : comm->windows)
    registered = registered || (own->memory != nullptr && from >= own->memory && from + count <= own->memory + own->bytes);
  if (!registered) return kInvalidUsage;
  FakeComm* to = comm->group->joined.at(peer);
  char* memory = to->windows.at(w->index)->memory + offset;
  std::atomic<int64_t>* come = cell(to, {comm->rank, signal, context});
  comm->pending = "ncclPutSignal";
  const Result r = enqueue(comm, stream, [=] {
    std::memcpy(memory, from, count);
    come->fetch_add(1);
  });
  return answer(comm, r, hold);
}
RMA Result ncclSignal(int peer, int signal, int context, unsigned flags, CommHandle handle, StreamHandle stream) {
  ENTER("ncclSignal");
  FakeComm* comm = known(handle);
  if (comm == nullptr || !place(comm, peer, signal, context, flags) || comm->windows.empty()) return kInvalidUsage;
  std::atomic<int64_t>* come = cell(comm->group->joined.at(peer), {comm->rank, signal, context});
  comm->pending = "ncclSignal";
  return answer(comm, enqueue(comm, stream, [=] { come->fetch_add(1); }), hold);
}
RMA Result ncclWaitSignal(int n, WaitSignal* signals, CommHandle handle, StreamHandle stream) {
  ENTER("ncclWaitSignal");
  FakeComm* comm = known(handle);
  if (comm == nullptr || n < 1 || comm->windows.empty()) return kInvalidUsage;
  std::vector<std::pair<std::atomic<int64_t>*, int64_t>> until;
  for (int i = 0; i < n; ++i) {
    const WaitSignal& s = signals[i];
    if (s.count < 1 || !place(comm, s.peer, s.signal, s.context, 0)) return kInvalidArgument;
    const Signal from{s.peer, s.signal, s.context};
    until.emplace_back(cell(comm, from), comm->taken[from] += s.count);
  }
  comm->pending = "ncclWaitSignal";
  const Result r = enqueue(comm, stream, [until] {
    for (const auto& [come, wanted] : until)
      while (*come < wanted) std::this_thread::sleep_for(std::chrono::microseconds(200));
  });
  return answer(comm, r, hold);
}
