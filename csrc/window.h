// Views of arena memory: a fixed mapping, and an address range whose contents can be exchanged.
#pragma once

#include <cstdint>

#include "arena.h"

namespace tide {

// A shared mapping of one range of the arena. It stays valid after the arena object is gone.
class Mapping {
 public:
  Mapping(const Arena& arena, int64_t offset, int64_t bytes);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  uint64_t address() const { return reinterpret_cast<uint64_t>(address_); }
  uint64_t bytes() const { return bytes_; }

 private:
  void* address_ = nullptr;
  uint64_t bytes_ = 0;
  uint64_t mapped_bytes_ = 0;
};

// A range of virtual addresses. At first any access faults; then it shows a range of the arena, or poison.
class Window {
 public:
  explicit Window(int64_t bytes);
  ~Window();
  Window(const Window&) = delete;
  Window& operator=(const Window&) = delete;

  void map(const Arena& arena, int64_t offset);
  // Private pages of 0xFF, which is a NaN in every floating-point type: a stale read is seen, a stale
  // write reaches nobody.
  void poison();

  uint64_t address() const { return reinterpret_cast<uint64_t>(address_); }
  uint64_t bytes() const { return bytes_; }

 private:
  void reset_after_failure(int error, const char* what);

  void* address_ = nullptr;
  uint64_t bytes_ = 0;
  uint64_t mapped_bytes_ = 0;  // whole pages
};

// Ask the kernel for huge pages behind private memory that is about to be written: where a page fault is dear
// (virtual machines), the faults of a fresh buffer cost more than the writing. Advice: failure changes nothing.
void advise_huge(uint64_t address, uint64_t bytes);

}  // namespace tide
