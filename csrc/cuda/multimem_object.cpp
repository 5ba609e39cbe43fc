#include "multimem_object.h"

#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "stream.h"

namespace tide::cuda {
namespace {

bool says_no(const char* value) {  // of a variable that asks to enable
  char* end = nullptr;
  const long long number = std::strtoll(value, &end, 0);
  return end != value && number == 0;
}

bool says_yes(const char* value) {  // of a variable that asks to disable: whatever is not plainly a no
  for (const char* no : {"", "0", "false", "no", "off"})
    if (strcasecmp(value, no) == 0) return false;
  return true;
}

const char* missing_entry_point(const Api& cu) {
  if (cu.MulticastCreate == nullptr) return "cuMulticastCreate";
  if (cu.MulticastAddDevice == nullptr) return "cuMulticastAddDevice";
  if (cu.MulticastBindMem == nullptr) return "cuMulticastBindMem";
  if (cu.MulticastUnbind == nullptr) return "cuMulticastUnbind";
  if (cu.MulticastGetGranularity == nullptr) return "cuMulticastGetGranularity";
  return nullptr;
}

void require_multicast(int64_t device) {
  const std::string refusal = multicast_refusal(device);
  if (!refusal.empty()) throw CudaError("multicast cannot be used: " + refusal);
}

MulticastObjectProp properties(int64_t device, int64_t devices, uint64_t bytes) {
  if (devices < 2 || devices > 1024)
    throw std::invalid_argument("devices is " + std::to_string(devices) + "; a multicast object joins 2 or more");
  (void)device_id(device);
  MulticastObjectProp p{};
  p.devices = static_cast<unsigned>(devices);
  p.size = bytes;
  p.handle_types = kHandlePosixFd;
  return p;
}

}  // namespace

std::string multicast_switched_off() {
  if (const char* v = std::getenv("NCCL_NVLS_ENABLE"); v != nullptr && says_no(v))
    return std::string("NCCL_NVLS_ENABLE=") + v;
  for (const char* name : {"TORCH_SYMM_MEM_DISABLE_MULTICAST", "NVSHMEM_DISABLE_NVLS"})
    if (const char* v = std::getenv(name); v != nullptr && says_yes(v)) return std::string(name) + "=" + v;
  return "";
}

std::string multicast_refusal(int64_t device) {
  const std::string off = multicast_switched_off();
  if (!off.empty()) return "it is switched off (" + off + ")";
  const DeviceId id = device_id(device);
  const Api& cu = api();
  const auto attribute = [&](Attribute which) {
    int value = 0;  // attributes that an old driver does not know count as "no"
    return cu.DeviceGetAttribute(&value, which, id) == kSuccess ? value : 0;
  };
  if (const char* missing = missing_entry_point(cu))
    return std::string("the driver has no ") + missing + " (CUDA 12.1 or newer has)";
  if (attribute(kComputeCapabilityMajor) < 9)
    return "device " + std::to_string(device) + " is older than sm_90";
  if (attribute(kMulticastSupported) == 0)
    return "device " + std::to_string(device) + " is on no NVSwitch with multicast, or its fabric manager does not run";
  return "";
}

int64_t Multicast::whole_bytes(int64_t device, int64_t devices, int64_t bytes) {
  require_multicast(device);
  const uint64_t granules = Device::get(device).whole_granules(bytes);
  const MulticastObjectProp p = properties(device, devices, granules);
  size_t granule = 0;
  check(api().MulticastGetGranularity(&granule, &p, kMulticastGranularityMinimum), "cuMulticastGetGranularity");
  return static_cast<int64_t>((granules + granule - 1) / granule * granule);
}

Multicast::Multicast(int64_t device, int64_t devices, int64_t bytes)
    : device_((require_multicast(device), Device::get(device))) {
  bytes_ = static_cast<uint64_t>(whole_bytes(device, devices, bytes));
  const MulticastObjectProp p = properties(device, devices, bytes_);
  check(api().MulticastCreate(&handle_, &p), "cuMulticastCreate");
}

std::shared_ptr<Multicast> Multicast::from_fd(int fd, int64_t device, int64_t devices, int64_t bytes) {
  require_multicast(device);
  if (fd < 0) throw std::invalid_argument("fd must not be negative; got " + std::to_string(fd));
  const auto whole = static_cast<uint64_t>(whole_bytes(device, devices, bytes));
  Device& d = Device::get(device);
  const Current current(d);
  MemHandle handle = 0;
  check(api().MemImportFromShareableHandle(&handle, reinterpret_cast<void*>(static_cast<intptr_t>(fd)),
                                           kHandlePosixFd),
        "cuMemImportFromShareableHandle");
  return std::shared_ptr<Multicast>(new Multicast(d, handle, whole));
}

int Multicast::export_fd() const {
  int fd = -1;
  check(api().MemExportToShareableHandle(&fd, handle_, kHandlePosixFd, 0), "cuMemExportToShareableHandle");
  return fd;
}

void Multicast::add_device() { check(api().MulticastAddDevice(handle_, device_.id()), "cuMulticastAddDevice"); }

void Multicast::bind(std::shared_ptr<const Allocation> memory) {
  if (bound_ != nullptr) throw std::invalid_argument("the multicast object has memory of this device already");
  if (memory->device() != device())
    throw std::invalid_argument("the memory is on device " + std::to_string(memory->device()) +
                                "; this rank's is device " + std::to_string(device()));
  if (memory->bytes() < bytes_)
    throw std::invalid_argument("the memory has " + std::to_string(memory->bytes()) +
                                " bytes; the multicast object " + std::to_string(bytes_));
  const Current current(device_);
  check(api().MulticastBindMem(handle_, 0, memory->handle(), 0, bytes_, 0), "cuMulticastBindMem");
  bound_ = std::move(memory);
}

void Multicast::map() {
  if (bound_ == nullptr) throw std::invalid_argument("memory must be bound before the multicast object is mapped");
  if (address_ != 0) return;
  const Current current(device_);
  DevicePtr at = 0;
  check(api().MemAddressReserve(&at, bytes_, 0, 0, 0), "cuMemAddressReserve");
  Result r = api().MemMap(at, bytes_, 0, handle_, 0);
  const char* call = "cuMemMap";
  if (r == kSuccess) {
    const MemAccessDesc access = {{kLocationDevice, device()}, kAccessReadWrite};
    r = api().MemSetAccess(at, bytes_, &access, 1);
    call = "cuMemSetAccess";
    if (r != kSuccess) (void)api().MemUnmap(at, bytes_);
  }
  if (r != kSuccess) (void)api().MemAddressFree(at, bytes_);
  check(r, call);
  address_ = at;
}

void Multicast::take_down() {
  const Current current(device_);
  if (address_ != 0) {
    (void)api().MemUnmap(address_, bytes_);
    (void)api().MemAddressFree(address_, bytes_);
  }
  if (bound_ != nullptr) (void)api().MulticastUnbind(handle_, device_.id(), 0, bytes_);
  if (handle_ != 0) (void)api().MemRelease(handle_);
}

Multicast::~Multicast() {
  try {
    if (address_ != 0 && !settle_for_teardown(device_)) {
      new std::shared_ptr<const Allocation>(std::move(bound_));  // leaks on purpose
      return;
    }
    take_down();
  } catch (const std::exception&) {
    // The driver is going down.
  }
}

}  // namespace tide::cuda
