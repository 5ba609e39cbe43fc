#include "memory.h"

#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

#include "error.h"
#include "stream.h"

namespace tide::cuda {
Allocation::Allocation(int64_t device, int64_t bytes) : device_(Device::get(device)) {
  bytes_ = device_.whole_granules(bytes);
  const MemAllocationProp prop = device_.allocation_properties();
  const Result r = api().MemCreate(&handle_, bytes_, &prop, 0);
  if (r == kErrorOutOfMemory)
    throw OsError(ENOMEM, "device " + std::to_string(device) + " has no " + std::to_string(bytes_) +
                              " bytes left (cuMemCreate: " + describe(r) +
                              "); memory that torch caches can be given back with torch.cuda.empty_cache()");
  check(r, "cuMemCreate");
}

std::shared_ptr<Allocation> Allocation::from_fd(int fd, int64_t bytes, int64_t device) {
  Device& d = Device::get(device);
  const uint64_t whole = d.whole_granules(bytes);
  if (fd < 0) throw std::invalid_argument("fd must not be negative; got " + std::to_string(fd));
  const Current current(d);
  MemHandle handle = 0;
  check(api().MemImportFromShareableHandle(&handle, reinterpret_cast<void*>(static_cast<intptr_t>(fd)),
                                           kHandlePosixFd),
        "cuMemImportFromShareableHandle");
  return std::shared_ptr<Allocation>(new Allocation(d, handle, whole));
}

Allocation::~Allocation() {
  if (handle_ != 0) (void)api().MemRelease(handle_);
}

int Allocation::export_fd() const {
  int fd = -1;
  check(api().MemExportToShareableHandle(&fd, handle_, kHandlePosixFd, 0), "cuMemExportToShareableHandle");
  return fd;
}

Window::Window(int64_t device, int64_t bytes) : device_(Device::get(device)) {
  bytes_ = device_.whole_granules(bytes);
  const Current current(device_);
  check(api().MemAddressReserve(&address_, bytes_, 0, 0, 0), "cuMemAddressReserve");
}

Window::~Window() {
  try {
    if (shown_ != nullptr && !settle_for_teardown(device_)) {
      new std::shared_ptr<const Allocation>(std::move(shown_));  // leaks on purpose
      return;
    }
    const Current current(device_);
    if (shown_ != nullptr) (void)api().MemUnmap(address_, bytes_);
    (void)api().MemAddressFree(address_, bytes_);
  } catch (const std::exception&) {
    // The driver is going down: the process ends, and with it the mapping.
  }
}

void Window::map(std::shared_ptr<const Allocation> allocation) {
  if (shown_ == allocation) return;
  if (allocation->bytes() < bytes_)
    throw std::invalid_argument("the allocation has " + std::to_string(allocation->bytes()) + " bytes; the window " +
                                std::to_string(bytes_));
  unmap();
  const Current current(device_);
  check(api().MemMap(address_, bytes_, 0, allocation->handle(), 0), "cuMemMap");
  const MemAccessDesc access = {{kLocationDevice, device_.ordinal()}, kAccessReadWrite};
  const Result r = api().MemSetAccess(address_, bytes_, &access, 1);
  if (r != kSuccess) {
    (void)api().MemUnmap(address_, bytes_);
    check(r, "cuMemSetAccess (can this device reach the one that holds the memory?)");
  }
  shown_ = std::move(allocation);
}

void Window::unmap() {
  if (shown_ == nullptr) return;
  if (!settle(device_, patience_ns()))
    throw OsError(ETIMEDOUT, "device " + std::to_string(device()) + " is still busy after " +
                                 std::to_string(patience_ns() / 1'000'000'000) + " s; the window was left as it is");
  const Current current(device_);
  check(api().MemUnmap(address_, bytes_), "cuMemUnmap");
  shown_.reset();
}

HostPage::HostPage(Device& device, size_t bytes) : device_(device), bytes_(bytes) {
  const Current current(device_);
  check(api().MemHostAlloc(&host_, bytes, kHostAllocPortable | kHostAllocDeviceMap), "cuMemHostAlloc");
  std::memset(host_, 0, bytes);
  const Result r = api().MemHostGetDevicePointer(&device_address_, host_, 0);
  if (r != kSuccess) {
    (void)api().MemFreeHost(host_);
    check(r, "cuMemHostGetDevicePointer");
  }
}

HostPage::~HostPage() {
  if (host_ == nullptr) return;
  try {
    const Current current(device_);
    (void)api().MemFreeHost(host_);
  } catch (const std::exception&) {
  }
}

}  // namespace tide::cuda
