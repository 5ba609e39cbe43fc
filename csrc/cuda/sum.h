// Sums as tiles: what a program adds up, cut into equal pieces for kernels that come from Python.
//
// Sums of one kind share a kernel. Every kernel gets, in this order: the address of the tile table, int32 first
// tile, int32 number of tiles, the address of the own staging, the address of the output, fp32 factor, int32 whether
// sums are divided by it (1) or multiplied (0; factor 1 for sums that are not scaled), `max_pointers` int64 addresses
// (unused ones 0), `extra_null_pointers` null pointers.
//
// A tile of staged contributions is six int64: index of the gradient's address, element offset in that gradient,
// element offset of the first staged source in the staging, elements from one staged source to the next, element
// offset in the output, elements. A tile of a landing, whose sources may lie anywhere, is: element offset in the
// output, elements, and for each source the index of its address and its element offset; it has no staging.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <vector>

#include "../program.h"
#include "driver.h"

namespace tide::cuda {

struct SumKernel {
  uint64_t function;
  int64_t threads, shared_bytes, ctas, max_pointers, tile, extra_null_pointers;
};

// What a kernel is made for.
struct SumKind {
  bool landing;  // sources anywhere, in fp32; else staged ones at a constant distance and then a gradient
  int64_t sources, src_dtype, dst_dtype;
  bool accumulate;

  static SumKind of(const Op& op);
  bool operator==(const SumKind& o) const {
    return landing == o.landing && sources == o.sources && src_dtype == o.src_dtype && dst_dtype == o.dst_dtype &&
           accumulate == o.accumulate;
  }
};

// Consecutive sums of one kind that touch different places of the output, and so may be added up in any order.
struct SumRun {
  size_t kind;  // its number
  std::vector<size_t> ops;
};

class SumPlan {
 public:
  // Of the runs of kind `kind`. Throws std::invalid_argument for sums that the kernel cannot do.
  SumPlan(const tide::Program& table, const std::vector<SumRun>& runs, size_t kind, const SumKernel& kernel,
          Device& device);
  ~SumPlan();
  SumPlan(const SumPlan&) = delete;
  SumPlan& operator=(const SumPlan&) = delete;

  Device& device() const { return device_; }
  size_t n_tiles() const { return n_tiles_; }
  size_t n_launches() const;
  // The kernel for one run; `bases` are the call's addresses.
  void launch(size_t run, const std::vector<uint64_t>& bases, const Scaling& scaling, StreamHandle stream) const;

 private:
  struct Launch {
    int32_t first_tile = 0, n_tiles = 0;
    int64_t staging = -1;  // base number; -1: nothing is staged
    int64_t output = -1;
    bool scaled = false;
    std::vector<int64_t> pointers;  // base numbers
  };

  void add_staged(const tide::Program& table, size_t op, std::vector<Launch>& launches);
  void add_landing(const tide::Program& table, size_t op, std::vector<Launch>& launches);
  // The launch that takes a sum: the last one if it can, or a new one. `wanted`: base numbers of its addresses.
  Launch& launch_for(const Launch& like, const std::vector<int64_t>& wanted, std::vector<Launch>& launches) const;
  void add_tile(std::initializer_list<int64_t> words, Launch& launch);
  void upload();

  Device& device_;
  SumKernel kernel_;
  std::vector<int64_t> words_;  // all tiles
  size_t n_tiles_ = 0;
  std::vector<std::vector<Launch>> runs_;  // of other kinds: empty
  DevicePtr table_ = 0;
};

}  // namespace tide::cuda
