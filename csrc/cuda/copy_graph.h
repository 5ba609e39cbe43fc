// Copies within one GPU's memory, launched as a CUDA graph. The driver takes about three microseconds of the host for
// each such copy, in a batch as well; a graph of many takes about one.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "copies.h"
#include "driver.h"

namespace tide::cuda {

// One after another: each by itself has the memory's bandwidth.
class CopyGraph {
 public:
  // `copies` are rows of bytes without pitches.
  CopyGraph(Device& device, const std::vector<PlacedCopy>& copies);
  ~CopyGraph();
  CopyGraph(const CopyGraph&) = delete;
  CopyGraph& operator=(const CopyGraph&) = delete;

  bool is_of(const Device& device, const std::vector<PlacedCopy>& copies) const;
  // Returns at once.
  void launch(StreamHandle stream) const;

 private:
  Device& device_;
  std::vector<PlacedCopy> copies_;
  GraphHandle graph_ = nullptr;
  GraphExecHandle exec_ = nullptr;
};

// Graphs for the addresses that copies of one place in a program have had lately: a landing has as many as slots.
class CopyGraphs {
 public:
  void launch(Device& device, const std::vector<PlacedCopy>& copies, StreamHandle stream);

 private:
  std::mutex lock_;
  std::vector<std::unique_ptr<CopyGraph>> graphs_;  // the latest last
};

}  // namespace tide::cuda
