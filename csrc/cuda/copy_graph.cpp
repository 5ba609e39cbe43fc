#include "copy_graph.h"

#include <algorithm>
#include <utility>

namespace tide::cuda {
namespace {

// More than a ring has slots; beyond that, addresses keep changing, and what is kept would only grow.
constexpr size_t kKept = 8;

MemcpyParams params(const PlacedCopy& placed) {
  MemcpyParams copy{};
  copy.src_type = copy.dst_type = kMemoryTypeDevice;
  copy.src_device = placed.src;
  copy.dst_device = placed.dst;
  copy.width_bytes = placed.shape->row_bytes;
  copy.height = copy.depth = 1;
  return copy;
}

}  // namespace

CopyGraph::CopyGraph(Device& device, const std::vector<PlacedCopy>& copies) : device_(device), copies_(copies) {
  const Current current(device_);
  const Api& cu = api();
  check(cu.GraphCreate(&graph_, 0), "cuGraphCreate");
  try {
    GraphNodeHandle last = nullptr;
    for (const PlacedCopy& c : copies_) {
      const MemcpyParams copy = params(c);
      GraphNodeHandle node = nullptr;
      check(cu.GraphAddMemcpyNode(&node, graph_, last == nullptr ? nullptr : &last, last != nullptr, &copy,
                                  device_.context()),
            "cuGraphAddMemcpyNode");
      last = node;
    }
    check(cu.GraphInstantiate(&exec_, graph_, 0), "cuGraphInstantiateWithFlags");
  } catch (...) {
    (void)cu.GraphDestroy(graph_);
    throw;
  }
}

// Launches that are still under way keep what they need.
CopyGraph::~CopyGraph() {
  try {
    const Current current(device_);
    (void)api().GraphExecDestroy(exec_);
    (void)api().GraphDestroy(graph_);
  } catch (const std::exception&) {
    // The driver is going down.
  }
}

bool CopyGraph::is_of(const Device& device, const std::vector<PlacedCopy>& copies) const {
  const auto same = [](const PlacedCopy& a, const PlacedCopy& b) {
    return a.src == b.src && a.dst == b.dst && a.shape == b.shape;
  };
  return &device == &device_ && std::equal(copies.begin(), copies.end(), copies_.begin(), copies_.end(), same);
}

void CopyGraph::launch(StreamHandle stream) const { check(api().GraphLaunch(exec_, stream), "cuGraphLaunch"); }

void CopyGraphs::launch(Device& device, const std::vector<PlacedCopy>& copies, StreamHandle stream) {
  std::lock_guard<std::mutex> hold(lock_);
  const auto found =
      std::find_if(graphs_.begin(), graphs_.end(), [&](const auto& g) { return g->is_of(device, copies); });
  if (found != graphs_.end()) {
    std::rotate(found, found + 1, graphs_.end());
  } else {
    auto made = std::make_unique<CopyGraph>(device, copies);
    if (graphs_.size() == kKept) graphs_.erase(graphs_.begin());
    graphs_.push_back(std::move(made));
  }
  graphs_.back()->launch(stream);
}

}  // namespace tide::cuda
