// Device memory that other processes can map, and the addresses it is seen at.
#pragma once

#include <cstdint>
#include <memory>

#include "driver.h"

namespace tide::cuda {

// Physical memory of a device, made here or imported from the process that made it.
class Allocation {
 public:
  Allocation(int64_t device, int64_t bytes);
  // `device` is the importing rank's own; the memory may lie on another. `fd` stays the caller's.
  static std::shared_ptr<Allocation> from_fd(int fd, int64_t bytes, int64_t device);
  ~Allocation();
  Allocation(const Allocation&) = delete;
  Allocation& operator=(const Allocation&) = delete;

  int export_fd() const;  // a new descriptor, the caller's to close
  int device() const { return device_.ordinal(); }
  uint64_t bytes() const { return bytes_; }  // whole granules
  MemHandle handle() const { return handle_; }

 private:
  Allocation(Device& device, MemHandle handle, uint64_t bytes) : device_(device), handle_(handle), bytes_(bytes) {}

  Device& device_;
  MemHandle handle_ = 0;
  uint64_t bytes_ = 0;
};

// A range of addresses of one device's context that shows an allocation, or nothing.
//
// What is shown is taken down only once the work given to the device beforehand is through; the destructor
// waits for that a while, and lets the addresses leak rather than pull memory from under running copies.
class Window {
 public:
  Window(int64_t device, int64_t bytes);
  ~Window();
  Window(const Window&) = delete;
  Window& operator=(const Window&) = delete;

  // Shows the allocation's first bytes. Waits for the device's work (patience_ns() at most, then OsError with
  // ETIMEDOUT) if another allocation was shown; nothing is done if it was this one.
  void map(std::shared_ptr<const Allocation> allocation);
  void unmap();

  int device() const { return device_.ordinal(); }
  uint64_t address() const { return address_; }
  uint64_t bytes() const { return bytes_; }
  bool shows(const Allocation& allocation) const { return shown_.get() == &allocation; }

 private:
  Device& device_;
  DevicePtr address_ = 0;
  uint64_t bytes_ = 0;  // whole granules
  std::shared_ptr<const Allocation> shown_;
};

// A whole allocation, shown for good.
class Mapping {
 public:
  Mapping(std::shared_ptr<const Allocation> allocation, int64_t device)
      : window_(device, static_cast<int64_t>(allocation->bytes())) {
    window_.map(std::move(allocation));
  }
  int device() const { return window_.device(); }
  uint64_t address() const { return window_.address(); }
  uint64_t bytes() const { return window_.bytes(); }

 private:
  Window window_;
};

// Host memory that the device can write, at one address for the host and another for the device.
class HostPage {
 public:
  HostPage(Device& device, size_t bytes);
  ~HostPage();
  HostPage(const HostPage&) = delete;
  HostPage& operator=(const HostPage&) = delete;

  uint32_t* words() const { return static_cast<uint32_t*>(host_); }
  size_t bytes() const { return bytes_; }
  DevicePtr device_address() const { return device_address_; }
  // To be called when the device may still write it: it is then never given back.
  void keep_for_good() { host_ = nullptr; }

 private:
  Device& device_;
  size_t bytes_;
  void* host_ = nullptr;
  DevicePtr device_address_ = 0;
};

}  // namespace tide::cuda
