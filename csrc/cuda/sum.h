// Sums as tiles: what a program adds up, cut into equal pieces for a kernel that comes from Python.
//
// The kernel gets, in this order: the address of the tile table, int32 first tile, int32 number of tiles,
// the address of the own staging, the address of the output, fp32 1/divisor (1 for sums that are not scaled),
// `max_pointers` int64 gradient addresses (unused ones 0), `extra_null_pointers` null pointers. A tile is six
// int64: index into the gradient addresses, element offset in that gradient, element offset of the first staged
// source in the staging, elements from one staged source to the next, element offset in the output, elements.
// Dividing by a number that is no power of two is multiplying by its rounded reciprocal here: the last bit may
// differ from the CPU, which divides.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "../program.h"
#include "driver.h"

namespace tide::cuda {

struct SumKernel {
  uint64_t function;
  int64_t threads, shared_bytes, ctas, max_pointers, tile, extra_null_pointers;
};

class SumPlan {
 public:
  using Tile = std::array<int64_t, 6>;

  // `runs`: op numbers of consecutive sums. Throws std::invalid_argument for sums that the kernel cannot do.
  SumPlan(const tide::Program& table, const std::vector<std::vector<size_t>>& runs, const SumKernel& kernel,
          Device& device);
  ~SumPlan();
  SumPlan(const SumPlan&) = delete;
  SumPlan& operator=(const SumPlan&) = delete;

  Device& device() const { return device_; }
  size_t n_tiles() const { return tiles_.size(); }
  size_t n_launches() const;
  // The kernel for one run; `bases` are the call's addresses.
  void launch(size_t run, const std::vector<uint64_t>& bases, float inverse, StreamHandle stream) const;

 private:
  struct Launch {
    int32_t first_tile = 0, n_tiles = 0;
    int64_t staging = -1;  // base number; -1: nothing is staged
    int64_t output = -1;
    bool scaled = false;
    std::vector<int64_t> pointers;  // base numbers
  };

  void add(const tide::Program& table, size_t op, std::vector<Launch>& launches);
  void upload();

  Device& device_;
  SumKernel kernel_;
  int64_t n_sources_ = 0, src_dtype_ = 0, dst_dtype_ = 0;  // of the first sum; all are alike
  std::vector<Tile> tiles_;
  std::vector<std::vector<Launch>> runs_;
  DevicePtr table_ = 0;
};

}  // namespace tide::cuda
