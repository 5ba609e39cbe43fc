// Copies that are given to the device together, as a CUDA graph: launching one costs the same few microseconds
// however many copies it has, where each copy by itself costs about five.
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

#include "driver.h"

namespace tide::cuda {

// `rows` rows of `row_bytes`; the pitches count only if there are several.
struct CopyShape {
  size_t row_bytes, rows, src_pitch, dst_pitch;
};

struct CopyPlace {
  DevicePtr src, dst;
  bool operator==(const CopyPlace& o) const { return src == o.src && dst == o.dst; }
};

class CopyGraph {
 public:
  // `places` are those of the first launch.
  CopyGraph(Device& device, std::vector<CopyShape> shapes, const std::vector<CopyPlace>& places);
  ~CopyGraph();
  CopyGraph(const CopyGraph&) = delete;
  CopyGraph& operator=(const CopyGraph&) = delete;

  // Copies that are elsewhere than at the last launch are changed first; launches before are not affected.
  void launch(const std::vector<CopyPlace>& places, StreamHandle stream);
  const Device& device() const { return device_; }

 private:
  MemcpyParams params(size_t i, const CopyPlace& place) const;

  Device& device_;
  std::vector<CopyShape> shapes_;
  std::mutex lock_;
  std::vector<CopyPlace> places_;
  std::vector<GraphNodeHandle> nodes_;
  GraphHandle graph_ = nullptr;
  GraphExecHandle exec_ = nullptr;
};

}  // namespace tide::cuda
