// NVSwitch multicast: addresses whose stores reach the memory of every GPU of a node, and whose multimem loads add it up.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "memory.h"

namespace tide::cuda {

// Which variable of the environment says that there shall be no multicast, as "NAME=value"; empty if none does.
std::string multicast_switched_off();

// Why no multicast object may be made or used on a device, in words; empty if it may. Whatever touches multicast asks
// this first, here and in nccl_comm.cpp. Makes no context.
std::string multicast_refusal(int64_t device);

// A multicast object. All ranks of a node go through this together, with a barrier after each step: one creates it and
// hands out its descriptor, all add their device, all bind their memory, all map it.
class Multicast {
 public:
  // `bytes` widened to what `devices` devices need for one object; every bound memory needs as many.
  static int64_t whole_bytes(int64_t device, int64_t devices, int64_t bytes);
  // Throw CudaError with multicast_refusal()'s words, before any other call, if there are any.
  Multicast(int64_t device, int64_t devices, int64_t bytes);
  static std::shared_ptr<Multicast> from_fd(int fd, int64_t device, int64_t devices, int64_t bytes);
  ~Multicast();
  Multicast(const Multicast&) = delete;
  Multicast& operator=(const Multicast&) = delete;

  int export_fd() const;  // a new descriptor, the caller's to close
  void add_device();
  void bind(std::shared_ptr<const Allocation> memory);
  void map();

  int device() const { return device_.ordinal(); }
  uint64_t address() const { return address_; }  // 0 until mapped
  uint64_t bytes() const { return bytes_; }

 private:
  Multicast(Device& device, MemHandle handle, uint64_t bytes) : device_(device), handle_(handle), bytes_(bytes) {}
  void take_down();

  Device& device_;
  MemHandle handle_ = 0;
  uint64_t bytes_ = 0;
  DevicePtr address_ = 0;
  std::shared_ptr<const Allocation> bound_;
};

}  // namespace tide::cuda
