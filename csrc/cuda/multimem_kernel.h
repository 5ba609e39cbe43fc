// A kernel that comes as a compiled image, and its launch over a table of tiles.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "driver.h"
#include "multimem_types.h"
#include "scaling.h"

namespace tide::cuda {

class Kernel {
 public:
  // Loads `image` (a cubin for the device, or PTX) into the device's primary context and takes `name` from it.
  Kernel(int64_t device, std::string_view image, const std::string& name);
  ~Kernel();
  Kernel(const Kernel&) = delete;
  Kernel& operator=(const Kernel&) = delete;

  uint64_t function() const { return reinterpret_cast<uint64_t>(function_); }
  int device() const { return device_.ordinal(); }

  struct Tiles {
    uint64_t table;  // device address of the rows
    int64_t first, count;
    uint64_t staging, output;
    Scaling scaling;
    std::vector<uint64_t> addresses;  // as many as the kernel was compiled for
  };
  // With `ctas` blocks, or as many as there are tiles if those are fewer; nothing for no tiles.
  void launch(const Tiles& tiles, int64_t ctas, int64_t threads, uint64_t stream) const;

 private:
  Device& device_;
  ModuleHandle module_ = nullptr;
  FunctionHandle function_ = nullptr;
};

// The source of the landing kernel (multimem_landing.cu), for a compiler at run time.
const char* landing_source();

}  // namespace tide::cuda
