// Copies between device memories in the fake driver.
#include "world.h"

namespace {

struct FakeCopy {
  DevicePtr src, dst;
  size_t width, height, src_pitch, dst_pitch;

  bool sound() const {
    return src != 0 && dst != 0 && width != 0 && height != 0 && src_pitch >= width && dst_pitch >= width;
  }
  void run() const {
    for (size_t r = 0; r < height; ++r)
      store(reinterpret_cast<char*>(dst) + r * dst_pitch, reinterpret_cast<const char*>(src) + r * src_pitch, width);
  }
};

Result give(StreamHandle s, std::vector<FakeCopy> copies) {
  if (s == nullptr || copies.empty()) return kInvalidValue;
  for (const FakeCopy& c : copies)
    if (!c.sound()) return kInvalidValue;
  {
    std::lock_guard<std::mutex> hold(world().lock);
    world().calls["copies"] += copies.size();
  }
  drain_before_launch(s);
  // Copies of a batch have no order: the last goes first.
  return submit(s, [copies = std::move(copies)] {
    for (size_t i = copies.size(); i-- > 0;) copies[i].run();
  });
}

}  // namespace

EXPORT Result cuMemcpyDtoDAsync_v2(DevicePtr dst, DevicePtr src, size_t n, StreamHandle s) {
  ENTER("cuMemcpyDtoDAsync");
  return give(s, {{src, dst, n, 1, n, n}});
}
EXPORT Result cuMemcpy2DAsync_v2(const Memcpy2D* c, StreamHandle s) {
  ENTER("cuMemcpy2DAsync");
  if (c->src_type != kMemoryTypeDevice || c->dst_type != kMemoryTypeDevice) return kInvalidValue;
  return give(s, {{c->src_device, c->dst_device, c->width_bytes, c->height, c->src_pitch, c->dst_pitch}});
}
#ifndef FAKE_CUDA_OLD
EXPORT Result cuMemcpyBatchAsync(DevicePtr* dsts, DevicePtr* srcs, size_t* sizes, size_t count,
                                 MemcpyAttributes* attributes, size_t* indices, size_t kinds, size_t* failed,
                                 StreamHandle s) {
  ENTER("cuMemcpyBatchAsync");
  if (kinds != 1 || indices[0] != 0 || failed == nullptr || attributes->source_order != kSourceInStreamOrder)
    return kInvalidValue;
  std::vector<FakeCopy> copies;
  for (size_t i = 0; i < count; ++i) copies.push_back({srcs[i], dsts[i], sizes[i], 1, sizes[i], sizes[i]});
  return give(s, std::move(copies));
}
EXPORT Result cuMemcpy3DBatchAsync(size_t count, MemcpyBatchOp* ops, size_t* failed, unsigned long long flags,
                                   StreamHandle s) {
  ENTER("cuMemcpy3DBatchAsync");
  if (flags != 0 || failed == nullptr) return kInvalidValue;
  std::vector<FakeCopy> copies;
  for (size_t i = 0; i < count; ++i) {
    const MemcpyBatchOp& o = ops[i];
    if (o.src.type != kOperandPointer || o.dst.type != kOperandPointer || o.extent[2] != 1 ||
        o.src.layer_height < o.extent[1] || o.dst.layer_height < o.extent[1] || o.source_order != kSourceInStreamOrder)
      return kInvalidValue;
    copies.push_back({o.src.address, o.dst.address, o.extent[0], o.extent[1], o.src.row_length, o.dst.row_length});
  }
  return give(s, std::move(copies));
}
#endif
