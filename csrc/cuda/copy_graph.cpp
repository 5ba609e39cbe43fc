#include "copy_graph.h"

#include <utility>

namespace tide::cuda {
namespace {

// Copies wait for the one this many before them: two at a time keep a link busy while one of them starts or ends,
// and more than that would only share it.
constexpr size_t kAtATime = 2;

}  // namespace

CopyGraph::CopyGraph(Device& device, std::vector<CopyShape> shapes, const std::vector<CopyPlace>& places)
    : device_(device), shapes_(std::move(shapes)), places_(places), nodes_(shapes_.size(), nullptr) {
  const Current current(device_);
  const Api& cu = api();
  check(cu.GraphCreate(&graph_, 0), "cuGraphCreate");
  try {
    for (size_t i = 0; i < shapes_.size(); ++i) {
      const MemcpyParams copy = params(i, places_[i]);
      const GraphNodeHandle* before = i < kAtATime ? nullptr : &nodes_[i - kAtATime];
      check(cu.GraphAddMemcpyNode(&nodes_[i], graph_, before, before != nullptr, &copy, device_.context()),
            "cuGraphAddMemcpyNode");
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

void CopyGraph::launch(const std::vector<CopyPlace>& places, StreamHandle stream) {
  std::lock_guard<std::mutex> hold(lock_);
  for (size_t i = 0; i < places.size(); ++i) {
    if (places[i] == places_[i]) continue;
    const MemcpyParams copy = params(i, places[i]);
    check(api().GraphExecMemcpyNodeSetParams(exec_, nodes_[i], &copy, device_.context()),
          "cuGraphExecMemcpyNodeSetParams");
    places_[i] = places[i];
  }
  check(api().GraphLaunch(exec_, stream), "cuGraphLaunch");
}

MemcpyParams CopyGraph::params(size_t i, const CopyPlace& place) const {
  const CopyShape& shape = shapes_[i];
  MemcpyParams copy{};
  copy.src_type = copy.dst_type = kMemoryTypeDevice;
  copy.src_device = place.src;
  copy.dst_device = place.dst;
  copy.width_bytes = shape.row_bytes;
  copy.height = shape.rows;
  copy.depth = 1;
  if (shape.rows > 1) {
    copy.src_pitch = shape.src_pitch;
    copy.dst_pitch = shape.dst_pitch;
  }
  return copy;
}

}  // namespace tide::cuda
