// Memory of the fake driver: memory files, mapped at reserved addresses.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "world.h"

EXPORT Result cuMemCreate(MemHandle* handle, size_t bytes, const MemAllocationProp* p, unsigned long long flags) {
  ENTER("cuMemCreate");
  if (bytes == 0 || bytes % kGranule != 0 || flags != 0 || p->handle_types != kHandlePosixFd ||
      p->type != kAllocationPinned || p->location.type != kLocationDevice)
    return kInvalidValue;
  World& w = world();
  std::lock_guard<std::mutex> hold(w.lock);
  size_t& used = w.used[p->location.id];
  if (used + bytes > w.limit) return kErrorOutOfMemory;
  const int fd = ::memfd_create("fake-cuda", MFD_CLOEXEC);
  if (fd < 0 || ::ftruncate(fd, static_cast<off_t>(bytes)) != 0) return kErrorOutOfMemory;
  used += bytes;
  auto* physical = new Physical{fd, p->location.id, bytes, true};
  w.physical.insert(physical);
  *handle = reinterpret_cast<MemHandle>(physical);
  return kSuccess;
}
EXPORT Result cuMemRelease(MemHandle handle) {
  ENTER("cuMemRelease");
  World& w = world();
  std::lock_guard<std::mutex> hold(w.lock);
  auto* p = reinterpret_cast<Physical*>(handle);
  if (w.physical.erase(p) == 0) return kInvalidValue;
  if (p->created) w.used[p->device] -= p->bytes;
  ::close(p->fd);
  delete p;
  return kSuccess;
}
EXPORT Result cuMemExportToShareableHandle(void* out, MemHandle handle, int type, unsigned long long flags) {
  ENTER("cuMemExportToShareableHandle");
  if (type != kHandlePosixFd || flags != 0) return kInvalidValue;
  *static_cast<int*>(out) = ::fcntl(reinterpret_cast<Physical*>(handle)->fd, F_DUPFD_CLOEXEC, 0);
  return kSuccess;
}
EXPORT Result cuMemImportFromShareableHandle(MemHandle* handle, void* os_handle, int type) {
  ENTER("cuMemImportFromShareableHandle");
  NEED_CONTEXT();
  struct stat info;
  const int fd = ::fcntl(static_cast<int>(reinterpret_cast<intptr_t>(os_handle)), F_DUPFD_CLOEXEC, 0);
  if (type != kHandlePosixFd || fd < 0 || ::fstat(fd, &info) != 0) return kInvalidValue;
  auto* physical = new Physical{fd, -1, static_cast<size_t>(info.st_size), false};
  std::lock_guard<std::mutex> hold(world().lock);
  world().physical.insert(physical);
  *handle = reinterpret_cast<MemHandle>(physical);
  return kSuccess;
}
EXPORT Result cuMemAddressReserve(DevicePtr* out, size_t bytes, size_t alignment, DevicePtr wanted,
                                  unsigned long long flags) {
  ENTER("cuMemAddressReserve");
  if (bytes == 0 || bytes % kGranule != 0 || alignment != 0 || wanted != 0 || flags != 0) return kInvalidValue;
  void* p = ::mmap(nullptr, bytes + kGranule, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) return kErrorOutOfMemory;
  const auto at = reinterpret_cast<uint64_t>(p), aligned = (at + kGranule - 1) / kGranule * kGranule;
  std::lock_guard<std::mutex> hold(world().lock);
  world().ranges[aligned] = {bytes + kGranule, bytes, at};
  *out = aligned;
  return kSuccess;
}
EXPORT Result cuMemAddressFree(DevicePtr at, size_t bytes) {
  ENTER("cuMemAddressFree");
  World& w = world();
  std::lock_guard<std::mutex> hold(w.lock);
  const auto it = w.ranges.find(at);
  if (it == w.ranges.end() || it->second.size != bytes || it->second.mapped) return kInvalidValue;
  ::munmap(reinterpret_cast<void*>(it->second.reserved_at), it->second.reserved);
  w.ranges.erase(it);
  return kSuccess;
}
EXPORT Result cuMemMap(DevicePtr at, size_t bytes, size_t offset, MemHandle handle, unsigned long long flags) {
  ENTER("cuMemMap");
  World& w = world();
  std::lock_guard<std::mutex> hold(w.lock);
  const auto it = w.ranges.find(at);
  auto* p = reinterpret_cast<Physical*>(handle);
  if (it == w.ranges.end() || it->second.mapped || offset != 0 || flags != 0 || bytes % kGranule != 0 ||
      bytes > it->second.size || w.physical.count(p) == 0 || bytes > p->bytes)
    return kInvalidValue;
  if (::mmap(reinterpret_cast<void*>(at), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, p->fd, 0) == MAP_FAILED)
    return kErrorOutOfMemory;
  it->second.mapped = true;
  it->second.shown_fd = p->fd;
  return kSuccess;
}
EXPORT Result cuMemSetAccess(DevicePtr at, size_t bytes, const MemAccessDesc* access, size_t count) {
  ENTER("cuMemSetAccess");
  World& w = world();
  std::lock_guard<std::mutex> hold(w.lock);
  const auto it = w.ranges.find(at);
  if (it == w.ranges.end() || !it->second.mapped || count != 1 || access->flags != kAccessReadWrite ||
      access->location.type != kLocationDevice || access->location.id >= w.devices)
    return kInvalidValue;
  return ::mprotect(reinterpret_cast<void*>(at), bytes, PROT_READ | PROT_WRITE) == 0 ? kSuccess : kInvalidValue;
}
EXPORT Result cuMemUnmap(DevicePtr at, size_t bytes) {
  ENTER("cuMemUnmap");
  World& w = world();
  std::lock_guard<std::mutex> hold(w.lock);
  const auto it = w.ranges.find(at);
  if (it == w.ranges.end() || !it->second.mapped) return kInvalidValue;
  ::mmap(reinterpret_cast<void*>(at), bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  it->second.mapped = false;
  return kSuccess;
}
EXPORT Result cuMemAlloc_v2(DevicePtr* p, size_t bytes) {
  ENTER("cuMemAlloc");
  NEED_CONTEXT();
  *p = reinterpret_cast<DevicePtr>(std::aligned_alloc(512, (bytes + 511) / 512 * 512));
  return kSuccess;
}
EXPORT Result cuMemFree_v2(DevicePtr p) {
  ENTER("cuMemFree");
  NEED_CONTEXT();
  std::free(reinterpret_cast<void*>(p));
  return kSuccess;
}
EXPORT Result cuMemHostAlloc(void** p, size_t bytes, unsigned flags) {
  ENTER("cuMemHostAlloc");
  NEED_CONTEXT();
  if (flags != (kHostAllocPortable | kHostAllocDeviceMap)) return kInvalidValue;
  *p = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  std::memset(*p, 0xEE, bytes);
  std::lock_guard<std::mutex> hold(world().lock);
  world().pinned[*p] = bytes;
  return kSuccess;
}
EXPORT Result cuMemFreeHost(void* p) {
  ENTER("cuMemFreeHost");
  {
    std::lock_guard<std::mutex> hold(world().lock);
    world().pinned.erase(p);
  }
  std::free(p);
  return kSuccess;
}
EXPORT Result cuMemHostGetDevicePointer_v2(DevicePtr* d, void* p, unsigned flags) {
  if (flags != 0) return kInvalidValue;
  *d = reinterpret_cast<DevicePtr>(p);
  return kSuccess;
}
