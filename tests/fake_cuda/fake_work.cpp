// What streams of the fake driver do.
#include "world.h"

namespace {

float bf16_to_float(uint16_t v) {
  const uint32_t bits = uint32_t{v} << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}
uint16_t float_to_bf16(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  if ((bits & 0x7FFFFFFF) > 0x7F800000) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}
float load(uint64_t base, int64_t i, int dtype) {
  return dtype == 0 ? reinterpret_cast<const float*>(base)[i] : bf16_to_float(reinterpret_cast<const uint16_t*>(base)[i]);
}

struct SumLaunch {
  FakeFunction f;
  const int64_t* tiles;
  int32_t first, count;
  uint64_t staging, output;
  float factor;
  int32_t divides;
  std::vector<uint64_t> pointers;

  float scaled(float total) const { return divides != 0 ? total / factor : total * factor; }
};

void store(uint64_t base, int64_t i, int dtype, float value) {
  if (dtype == 0) reinterpret_cast<float*>(base)[i] = value;
  else reinterpret_cast<uint16_t*>(base)[i] = float_to_bf16(value);
}

void run_landing(const SumLaunch& l) {
  // As thread blocks would: all of a launch read before any of them writes.
  std::vector<std::pair<int64_t, float>> results;
  for (int32_t t = l.first; t < l.first + l.count; ++t) {
    const int64_t* w = l.tiles + (2 + 2 * l.f.sources) * t;
    for (int64_t i = 0; i < w[1]; ++i) {
      float total = 0;
      for (int s = 0; s < l.f.sources; ++s) {
        const float v = load(l.pointers[static_cast<size_t>(w[2 + 2 * s])], w[3 + 2 * s] + i, 0);
        total = s == 0 ? v : total + v;
      }
      total = l.scaled(total);
      if (l.f.accumulate != 0) total = load(l.output, w[0] + i, l.f.dst_dtype) + total;
      results.emplace_back(w[0] + i, total);
    }
  }
  for (const auto& [at, value] : results) store(l.output, at, l.f.dst_dtype, value);
}

void run_sum(const SumLaunch& l) {
  if (l.f.sources != 0) return run_landing(l);
  for (int32_t t = l.first; t < l.first + l.count; ++t) {
    const int64_t* w = l.tiles + 6 * t;
    for (int64_t i = 0; i < w[5]; ++i) {
      float total = 0;
      for (int s = 0; s < l.f.staged; ++s) {
        const float v = load(l.staging, w[2] + s * w[3] + i, l.f.src_dtype);
        total = s == 0 ? v : total + v;
      }
      const float own = load(l.pointers[static_cast<size_t>(w[0])], w[1] + i, l.f.src_dtype);
      total = l.scaled(l.f.staged == 0 ? own : total + own);
      store(l.output, w[4] + i, l.f.dst_dtype, total);
    }
  }
}

void run_mem_ops(const std::vector<MemOp>& ops) {
  for (const MemOp& op : ops) {
    auto* cell = reinterpret_cast<uint32_t*>(op.address);
    if (op.operation == kWriteValue32) {
      __atomic_store_n(cell, op.value, __ATOMIC_SEQ_CST);
      continue;
    }
    for (int n = 0; static_cast<int32_t>(__atomic_load_n(cell, __ATOMIC_SEQ_CST) - op.value) < 0; ++n) nap(n);
  }
}

}  // namespace

EXPORT Result cuStreamCreateWithPriority(StreamHandle* out, unsigned flags, int priority) {
  ENTER("cuStreamCreateWithPriority");
  NEED_CONTEXT();
  if (flags != kStreamNonBlocking || priority > 0 || priority < -5) return kInvalidValue;
  if (!world().only.empty()) {
    std::lock_guard<std::mutex> hold(world().lock);
    *out = new char;
    world().streams[*out] = world().only[static_cast<size_t>(context_stack.back()->device)];
    return kSuccess;
  }
  auto q = std::make_shared<Queue>(context_stack.back()->device);
  q->priority = priority;
  std::thread(drain, q).detach();
  std::lock_guard<std::mutex> hold(world().lock);
  *out = q.get();
  world().streams[q.get()] = q;
  return kSuccess;
}
EXPORT Result cuStreamDestroy_v2(StreamHandle s) {
  ENTER("cuStreamDestroy");
  std::shared_ptr<Queue> q;
  {
    std::lock_guard<std::mutex> hold(world().lock);
    const auto it = world().streams.find(s);
    if (it == world().streams.end()) return kInvalidHandle;
    q = it->second;
    world().streams.erase(it);
  }
  if (!world().only.empty()) return kSuccess;
  std::lock_guard<std::mutex> hold(q->lock);
  q->closing = true;
  q->wake.notify_one();
  return kSuccess;
}
EXPORT Result cuStreamGetCtx(StreamHandle s, ContextHandle* c) {
  const auto q = queue_of(s);
  if (q == nullptr) return kInvalidHandle;
  *c = world().contexts[static_cast<size_t>(q->device)];
  return kSuccess;
}
EXPORT Result cuEventCreate(EventHandle* e, unsigned flags) {
  ENTER("cuEventCreate");
  NEED_CONTEXT();
  if (flags != kEventDisableTiming) return kInvalidValue;
  auto* event = new FakeEvent{context_stack.back()->device, std::make_shared<std::atomic<int>>(0)};
  std::lock_guard<std::mutex> hold(world().lock);
  world().events.insert(event);
  *e = event;
  return kSuccess;
}
EXPORT Result cuEventDestroy_v2(EventHandle e) {
  std::lock_guard<std::mutex> hold(world().lock);
  return world().events.erase(static_cast<FakeEvent*>(e)) != 0 ? kSuccess : kInvalidHandle;  // kept: others may hold it
}
EXPORT Result cuEventRecord(EventHandle e, StreamHandle s) {
  ENTER("cuEventRecord");
  NEED_CONTEXT();
  auto* event = static_cast<FakeEvent*>(e);
  if (!known_event(e) || event->device != context_stack.back()->device) return kInvalidHandle;
  const Flag flag = std::make_shared<std::atomic<int>>(1);
  event->flag = flag;
  return submit(s, [flag] { --*flag; });
}
EXPORT Result cuEventQuery(EventHandle e) {
  if (!known_event(e)) return kInvalidHandle;
  return *static_cast<FakeEvent*>(e)->flag == 0 ? kSuccess : kErrorNotReady;
}
EXPORT Result cuStreamWaitEvent(StreamHandle s, EventHandle e, unsigned flags) {
  ENTER("cuStreamWaitEvent");
  NEED_CONTEXT();
  if (!known_event(e) || flags != 0) return kInvalidHandle;
  const Flag flag = static_cast<FakeEvent*>(e)->flag;
  return submit(s, [flag] {
    for (int n = 0; *flag > 0; ++n) nap(n);
  });
}
static Result record_context(ContextHandle c, EventHandle e) {
  if (!known_event(e)) return kInvalidHandle;
  std::vector<std::shared_ptr<Queue>> queues;
  World& w = world();
  std::lock_guard<std::mutex> hold(w.lock);
  const int device = static_cast<Context*>(c)->device;
  queues.push_back(w.legacy[static_cast<size_t>(device)]);
  for (auto& [handle, q] : w.streams)
    if (q->device == device) queues.push_back(q);
  const Flag flag = std::make_shared<std::atomic<int>>(static_cast<int>(queues.size()));
  static_cast<FakeEvent*>(e)->flag = flag;
  for (auto& q : queues)
    if (!q->push([flag] { --*flag; })) --*flag;
  return kSuccess;
}
#ifndef FAKE_CUDA_OLD
EXPORT Result cuCtxRecordEvent(ContextHandle c, EventHandle e) {
  ENTER("cuCtxRecordEvent");
  return record_context(c, e);
}
#endif
EXPORT Result cuCtxSynchronize() {
  NEED_CONTEXT();
  EventHandle e;
  cuEventCreate(&e, kEventDisableTiming);
  record_context(context_stack.back(), e);
  while (cuEventQuery(e) == kErrorNotReady) nap();
  return cuEventDestroy_v2(e);
}

EXPORT Result cuStreamBatchMemOp_v2(StreamHandle s, unsigned count, MemOp* ops, unsigned flags) {
  ENTER("cuStreamBatchMemOp");
  if (count == 0 || count >= 256 || flags != 0) return kInvalidValue;
  for (unsigned i = 0; i < count; ++i)
    if ((ops[i].operation != kWaitValue32 && ops[i].operation != kWriteValue32) || ops[i].address % 4 != 0 ||
        ops[i].address == 0 || ops[i].flags != 0)
      return kInvalidValue;
  drain_before_launch(s);
  return submit(s, [batch = std::vector<MemOp>(ops, ops + count)] { run_mem_ops(batch); });
}
EXPORT Result cuMemcpyDtoHAsync_v2(void* dst, DevicePtr src, size_t n, StreamHandle s) {
  ENTER("cuMemcpyDtoHAsync");
  return submit(s, [=] {
    while (hold_host_copies) nap();
    std::memcpy(dst, reinterpret_cast<void*>(src), n);
  });
}
EXPORT Result cuMemcpyHtoDAsync_v2(DevicePtr dst, const void* src, size_t n, StreamHandle s) {
  ENTER("cuMemcpyHtoDAsync");
  return submit(s, [=] {
    while (hold_host_copies) nap();
    std::memcpy(reinterpret_cast<void*>(dst), src, n);
  });
}
EXPORT Result cuMemsetD8Async(DevicePtr dst, unsigned char value, size_t n, StreamHandle s) {
  ENTER("cuMemsetD8Async");
  return submit(s, [=] { std::memset(reinterpret_cast<void*>(dst), value, n); });
}
EXPORT Result cuFuncSetAttribute(FunctionHandle f, int attribute, int) {
  ENTER("cuFuncSetAttribute");
  std::lock_guard<std::mutex> hold(world().lock);
  return attribute == kMaxDynamicSharedBytes && world().functions.count(static_cast<FakeFunction*>(f)) != 0
             ? kSuccess
             : kInvalidHandle;
}
EXPORT Result cuLaunchKernel(FunctionHandle f, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by,
                             unsigned bz, unsigned, StreamHandle s, void** args, void** extra) {
  ENTER("cuLaunchKernel");
  {
    std::unique_lock<std::mutex> hold(world().lock);
    if (const auto kernel = world().kernels.find(f); kernel != world().kernels.end()) {
      const auto launch = kernel->second;
      hold.unlock();
      return y == 1 && z == 1 && by == 1 && bz == 1 && extra == nullptr ? launch(x, bx, s, args) : kInvalidValue;
    }
    if (world().functions.count(static_cast<FakeFunction*>(f)) == 0) return kInvalidHandle;
    world().last_grid = x;
  }
  if (x == 0 || y != 1 || z != 1 || bx == 0 || by != 1 || bz != 1 || extra != nullptr) return kInvalidValue;
  SumLaunch l{*static_cast<FakeFunction*>(f), nullptr, 0, 0, 0, 0, 0, 0, {}};
  size_t at = 0;
  std::memcpy(&l.tiles, args[at++], 8);
  std::memcpy(&l.first, args[at++], 4);
  std::memcpy(&l.count, args[at++], 4);
  std::memcpy(&l.staging, args[at++], 8);
  std::memcpy(&l.output, args[at++], 8);
  std::memcpy(&l.factor, args[at++], 4);
  std::memcpy(&l.divides, args[at++], 4);
  if (l.divides != 0 && l.divides != 1) return kInvalidValue;
  for (int i = 0; i < l.f.pointers; ++i) l.pointers.push_back(*static_cast<uint64_t*>(args[at++]));
  for (int i = 0; i < l.f.null_pointers; ++i)
    if (*static_cast<uint64_t*>(args[at++]) != 0) return kInvalidValue;
  if (x > static_cast<unsigned>(l.count)) return kInvalidValue;  // blocks without work
  drain_before_launch(s);
  return submit(s, [l] { run_sum(l); });
}
