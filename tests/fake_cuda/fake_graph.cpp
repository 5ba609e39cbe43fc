// Graphs of copies in the fake driver.
#include "world.h"

namespace {

struct FakeNode {
  MemcpyParams copy;
  std::vector<size_t> after;
};
struct FakeGraph {
  std::vector<FakeNode> nodes;
};

std::mutex lock;
std::map<void*, std::shared_ptr<FakeGraph>> graphs, execs;
std::map<void*, std::pair<FakeGraph*, size_t>> nodes;

bool sound(const MemcpyParams& c) {
  return c.src_type == kMemoryTypeDevice && c.dst_type == kMemoryTypeDevice && c.src_device != 0 && c.dst_device != 0 &&
         c.width_bytes != 0 && c.height != 0 && c.depth == 1 &&
         (c.height == 1 || (c.src_pitch >= c.width_bytes && c.dst_pitch >= c.width_bytes));
}

void run(const MemcpyParams& c) {
  for (size_t r = 0; r < c.height; ++r)
    store(reinterpret_cast<char*>(c.dst_device) + r * c.dst_pitch,
          reinterpret_cast<const char*>(c.src_device) + r * c.src_pitch, c.width_bytes);
}

// Of all the orders that the dependencies allow: the one in which later nodes go as early as they can.
void run_all(std::vector<FakeNode> all) {
  std::vector<bool> done(all.size(), false);
  for (size_t left = all.size(); left > 0; --left)
    for (size_t i = all.size(); i-- > 0;) {
      bool ready = !done[i];
      for (const size_t a : all[i].after) ready = ready && done[a];
      if (!ready) continue;
      run(all[i].copy);
      done[i] = true;
      break;
    }
}

}  // namespace

EXPORT Result cuGraphCreate(GraphHandle* out, unsigned flags) {
  ENTER("cuGraphCreate");
  if (flags != 0) return kInvalidValue;
  auto graph = std::make_shared<FakeGraph>();
  std::lock_guard<std::mutex> hold(lock);
  *out = graph.get();
  graphs[*out] = graph;
  return kSuccess;
}
EXPORT Result cuGraphAddMemcpyNode(GraphNodeHandle* out, GraphHandle g, const GraphNodeHandle* before, size_t n,
                                   const MemcpyParams* copy, ContextHandle context) {
  ENTER("cuGraphAddMemcpyNode");
  std::lock_guard<std::mutex> hold(lock);
  const auto it = graphs.find(g);
  if (it == graphs.end()) return kInvalidHandle;
  if (context == nullptr) return kInvalidContext;
  if (!sound(*copy)) return kInvalidValue;
  FakeNode node{*copy, {}};
  for (size_t i = 0; i < n; ++i) {
    const auto b = nodes.find(before[i]);
    if (b == nodes.end() || b->second.first != it->second.get()) return kInvalidHandle;
    node.after.push_back(b->second.second);
  }
  *out = new char;
  nodes[*out] = {it->second.get(), it->second->nodes.size()};
  it->second->nodes.push_back(std::move(node));
  return kSuccess;
}
EXPORT Result cuGraphInstantiateWithFlags(GraphExecHandle* out, GraphHandle g, unsigned long long flags) {
  ENTER("cuGraphInstantiate");
  NEED_CONTEXT();
  std::lock_guard<std::mutex> hold(lock);
  const auto it = graphs.find(g);
  if (it == graphs.end() || flags != 0) return kInvalidHandle;
  auto exec = std::make_shared<FakeGraph>(*it->second);
  *out = exec.get();
  execs[*out] = exec;
  return kSuccess;
}
EXPORT Result cuGraphExecMemcpyNodeSetParams(GraphExecHandle e, GraphNodeHandle n, const MemcpyParams* copy,
                                             ContextHandle context) {
  ENTER("cuGraphExecMemcpyNodeSetParams");
  std::lock_guard<std::mutex> hold(lock);
  const auto exec = execs.find(e);
  const auto node = nodes.find(n);
  if (exec == execs.end() || node == nodes.end()) return kInvalidHandle;
  if (context == nullptr) return kInvalidContext;
  MemcpyParams& old = exec->second->nodes[node->second.second].copy;
  if (!sound(*copy) || copy->width_bytes != old.width_bytes || copy->height != old.height) return kInvalidValue;
  old = *copy;
  return kSuccess;
}
EXPORT Result cuGraphLaunch(GraphExecHandle e, StreamHandle s) {
  ENTER("cuGraphLaunch");
  if (s == nullptr) return kInvalidValue;
  std::vector<FakeNode> all;
  {
    std::lock_guard<std::mutex> hold(lock);
    const auto exec = execs.find(e);
    if (exec == execs.end()) return kInvalidHandle;
    all = exec->second->nodes;  // as they are now: later changes do not reach this launch
  }
  drain_before_launch(s);
  return submit(s, [all] { run_all(all); });
}
EXPORT Result cuGraphExecDestroy(GraphExecHandle e) {
  ENTER("cuGraphExecDestroy");
  std::lock_guard<std::mutex> hold(lock);
  return execs.erase(e) != 0 ? kSuccess : kInvalidHandle;
}
EXPORT Result cuGraphDestroy(GraphHandle g) {
  ENTER("cuGraphDestroy");
  std::lock_guard<std::mutex> hold(lock);
  const auto it = graphs.find(g);
  if (it == graphs.end()) return kInvalidHandle;
  for (auto n = nodes.begin(); n != nodes.end();)
    n = n->second.first == it->second.get() ? nodes.erase(n) : std::next(n);
  graphs.erase(it);
  return kSuccess;
}
