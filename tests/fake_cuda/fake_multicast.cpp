// Multicast of the fake driver, with FAKE_CUDA_MULTICAST=1, and modules.
//
// A multicast object is a memory file of its own: a number that can be handed out as a descriptor. What is copied to
// an address that shows it goes to every bound memory, and what multimem_landing.cu loads there is their sum: that
// kernel's own source is compiled here for the host, in all its variants.
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "world.h"

namespace {

struct Member {
  DeviceId device;
  int fd;
};
struct Object {
  unsigned devices;
  size_t size;
  std::set<DeviceId> added;
  std::vector<Member> bound;
};
std::mutex lock;
std::map<ino_t, Object> objects;

ino_t number_of(int fd) {
  struct stat info;
  return ::fstat(fd, &info) == 0 ? info.st_ino : 0;
}
[[maybe_unused]] Object* object_of(MemHandle handle) {
  {
    std::lock_guard<std::mutex> hold(world().lock);
    if (world().physical.count(reinterpret_cast<Physical*>(handle)) == 0) return nullptr;
  }
  const auto it = objects.find(number_of(reinterpret_cast<Physical*>(handle)->fd));
  return it == objects.end() ? nullptr : &it->second;
}
// The object that an address shows, and the offset in it.
Object* shown_at(uint64_t address, size_t bytes, off_t* offset) {
  int fd = -1;
  {
    std::lock_guard<std::mutex> hold(world().lock);
    auto it = world().ranges.upper_bound(address);
    if (it == world().ranges.begin()) return nullptr;
    --it;
    if (!it->second.mapped || address + bytes > it->first + it->second.size) return nullptr;
    *offset = static_cast<off_t>(address - it->first);
    fd = it->second.shown_fd;
  }
  const auto object = objects.find(number_of(fd));
  return object == objects.end() ? nullptr : &object->second;
}

float bf16(unsigned bits) {
  bits <<= 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}
unsigned rounded(float f) {
  unsigned bits;
  std::memcpy(&bits, &f, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return (bits >> 16 | 0x40u) & 0xffffu;
  return (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
}

// What the switch gives for 16 bytes: sums in fp32, in the order of the devices here; bf16 rounded once at the end.
template <class Word>
void switch_sum(uint64_t address, Word* words) {
  std::lock_guard<std::mutex> hold(lock);
  off_t offset = 0;
  Object* object = address % 16 == 0 ? shown_at(address, 16, &offset) : nullptr;
  if (object == nullptr) std::abort();  // as on a GPU: an illegal address
  float sums[8] = {};
  for (size_t m = 0; m < object->bound.size(); ++m) {
    Word got[4];
    if (::pread(object->bound[m].fd, got, 16, offset) != 16) std::abort();
    for (int i = 0; i < (std::is_same_v<Word, float> ? 4 : 8); ++i) {
      float v;
      if constexpr (std::is_same_v<Word, float>) v = got[i];
      else v = bf16(got[i / 2] >> (i % 2 * 16) & 0xffffu);
      sums[i] = m == 0 ? v : sums[i] + v;
    }
  }
  for (int i = 0; i < 4; ++i) {
    if constexpr (std::is_same_v<Word, float>) words[i] = sums[i];
    else words[i] = rounded(sums[2 * i]) | rounded(sums[2 * i + 1]) << 16;
  }
}

// --- the kernel's source, on the host ---

struct Index {
  unsigned x;
};
thread_local Index blockIdx, threadIdx, gridDim, blockDim;
[[maybe_unused]] float __fmul_rn(float a, float b) { return a * b; }
[[maybe_unused]] float __fdiv_rn(float a, float b) { return a / b; }
[[maybe_unused]] float __fadd_rn(float a, float b) { return a + b; }
[[maybe_unused]] float __uint_as_float(unsigned u) {
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}
[[maybe_unused]] unsigned __float_as_uint(float f) {
  unsigned u;
  std::memcpy(&u, &f, 4);
  return u;
}

using Body = void (*)(const long long*, int, int, const void*, void*, float, int, unsigned long long,
                      unsigned long long, unsigned long long, unsigned long long);
std::map<std::string, Body>& bodies() {
  static std::map<std::string, Body> all;
  return all;
}
struct Enter {
  Enter(const char* name, Body body) { bodies()[name] = body; }
};

}  // namespace

#define __device__
#define __forceinline__ inline
#define __global__
#define __launch_bounds__(n)
#define TIDE_LANDING land_1
#define TIDE_NAME "fp32 fp32 store"
#include "landing_variant.h"
#define TIDE_ACCUMULATE
#define TIDE_LANDING land_2
#define TIDE_NAME "fp32 fp32 accumulate"
#include "landing_variant.h"
#define TIDE_OUTPUT_BF16
#define TIDE_LANDING land_3
#define TIDE_NAME "fp32 bf16 accumulate"
#include "landing_variant.h"
#define TIDE_PARTIAL_BF16
#define TIDE_LANDING land_4
#define TIDE_NAME "bf16 bf16 accumulate"
#include "landing_variant.h"
#undef TIDE_ACCUMULATE
#define TIDE_LANDING land_5
#define TIDE_NAME "bf16 bf16 store"
#include "landing_variant.h"
#undef TIDE_OUTPUT_BF16
#define TIDE_LANDING land_6
#define TIDE_NAME "bf16 fp32 store"
#include "landing_variant.h"
#define TIDE_ACCUMULATE
#define TIDE_LANDING land_7
#define TIDE_NAME "bf16 fp32 accumulate"
#include "landing_variant.h"
#undef TIDE_ACCUMULATE
#undef TIDE_PARTIAL_BF16
#define TIDE_OUTPUT_BF16
#define TIDE_LANDING land_8
#define TIDE_NAME "fp32 bf16 store"
#include "landing_variant.h"

static Result launch(Body body, unsigned blocks, unsigned threads, StreamHandle s, void** args) {
  const long long* tiles;
  int first, count;
  const void* staging;
  void* output;
  float factor;
  int divides;
  unsigned long long a[4];
  std::memcpy(&tiles, args[0], 8);
  std::memcpy(&first, args[1], 4);
  std::memcpy(&count, args[2], 4);
  std::memcpy(&staging, args[3], 8);
  std::memcpy(&output, args[4], 8);
  std::memcpy(&factor, args[5], 4);
  std::memcpy(&divides, args[6], 4);
  for (int i = 0; i < 4; ++i) std::memcpy(&a[i], args[7 + i], 8);
  if (blocks > static_cast<unsigned>(count)) return kInvalidValue;  // blocks without work
  return submit(s, [=, a0 = a[0], a1 = a[1], a2 = a[2], a3 = a[3]] {
    gridDim = {blocks};
    blockDim = {threads};
    for (blockIdx = {0}; blockIdx.x < blocks; ++blockIdx.x)
      for (threadIdx = {0}; threadIdx.x < threads; ++threadIdx.x)
        body(tiles, first, count, staging, output, factor, divides, a0, a1, a2, a3);
  });
}

// --- the driver's side ---

void store(void* to, const void* from, size_t bytes) {
  std::lock_guard<std::mutex> hold(lock);
  off_t offset = 0;
  Object* object = objects.empty() ? nullptr : shown_at(reinterpret_cast<uint64_t>(to), bytes, &offset);
  if (object == nullptr) {
    std::memcpy(to, from, bytes);
    return;
  }
  for (const Member& m : object->bound)
    if (::pwrite(m.fd, from, bytes, offset) != static_cast<ssize_t>(bytes)) std::abort();
}

#ifndef FAKE_CUDA_OLD
EXPORT Result cuMulticastGetGranularity(size_t* granule, const MulticastObjectProp* p, int option) {
  ENTER("cuMulticastGetGranularity");
  if (p->devices < 2 || p->handle_types != kHandlePosixFd || p->flags != 0 || option != 0) return kInvalidValue;
  *granule = 2 * kGranule;  // larger than that of memory, so that a mix-up shows
  return kSuccess;
}
EXPORT Result cuMulticastCreate(MemHandle* handle, const MulticastObjectProp* p) {
  ENTER("cuMulticastCreate");
  if (p->devices < 2 || p->size == 0 || p->size % (2 * kGranule) != 0 || p->handle_types != kHandlePosixFd)
    return kInvalidValue;
  const int fd = ::memfd_create("fake-multicast", MFD_CLOEXEC);
  if (fd < 0 || ::ftruncate(fd, static_cast<off_t>(p->size)) != 0) return kErrorOutOfMemory;
  auto* physical = new Physical{fd, -1, p->size, false};
  std::lock_guard<std::mutex> hold(lock);
  objects[number_of(fd)] = {p->devices, p->size, {}, {}};
  std::lock_guard<std::mutex> hold_world(world().lock);
  world().physical.insert(physical);
  *handle = reinterpret_cast<MemHandle>(physical);
  return kSuccess;
}
EXPORT Result cuMulticastAddDevice(MemHandle handle, DeviceId device) {
  ENTER("cuMulticastAddDevice");
  std::lock_guard<std::mutex> hold(lock);
  Object* object = object_of(handle);
  if (object == nullptr || object->added.size() == object->devices || !object->added.insert(device).second)
    return kInvalidValue;
  return kSuccess;
}
EXPORT Result cuMulticastBindMem(MemHandle handle, size_t at, MemHandle memory, size_t from, size_t bytes,
                                 unsigned long long flags) {
  ENTER("cuMulticastBindMem");
  NEED_CONTEXT();
  std::lock_guard<std::mutex> hold(lock);
  Object* object = object_of(handle);
  auto* physical = reinterpret_cast<Physical*>(memory);
  // All devices first: the real one blocks or fails, as it likes.
  if (object == nullptr || object->added.size() != object->devices || at != 0 || from != 0 || flags != 0 ||
      bytes != object->size || bytes > physical->bytes || object->added.count(context_stack.back()->device) == 0)
    return kInvalidValue;
  object->bound.push_back({context_stack.back()->device, physical->fd});
  return kSuccess;
}
EXPORT Result cuMulticastUnbind(MemHandle handle, DeviceId device, size_t at, size_t bytes) {
  ENTER("cuMulticastUnbind");
  std::lock_guard<std::mutex> hold(lock);
  Object* object = object_of(handle);
  if (object == nullptr || at != 0 || bytes != object->size) return kInvalidValue;
  for (auto it = object->bound.begin(); it != object->bound.end(); ++it)
    if (it->device == device) {
      object->bound.erase(it);
      return kSuccess;
    }
  return kInvalidValue;
}
#endif

// An image here is the name of a variant of the landing kernel.
EXPORT Result cuModuleLoadData(ModuleHandle* module, const void* image) {
  ENTER("cuModuleLoadData");
  NEED_CONTEXT();
  const auto it = bodies().find(static_cast<const char*>(image));
  if (it == bodies().end()) return kInvalidValue;
  *module = new Body(it->second);
  return kSuccess;
}
EXPORT Result cuModuleGetFunction(FunctionHandle* function, ModuleHandle module, const char* name) {
  ENTER("cuModuleGetFunction");
  if (std::strcmp(name, "land_multimem") != 0) return kInvalidValue;
  *function = module;
  std::lock_guard<std::mutex> hold(world().lock);
  world().kernels[module] = [body = *static_cast<Body*>(module)](unsigned blocks, unsigned threads, StreamHandle s,
                                                                void** args) {
    return launch(body, blocks, threads, s, args);
  };
  return kSuccess;
}
EXPORT Result cuModuleUnload(ModuleHandle module) {
  ENTER("cuModuleUnload");
  std::lock_guard<std::mutex> hold(world().lock);
  return world().kernels.erase(module) != 0 ? kSuccess : kInvalidHandle;
}
