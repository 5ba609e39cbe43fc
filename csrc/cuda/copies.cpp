#include "copies.h"

#include <algorithm>

namespace tide::cuda {
namespace {

// By copy engines: sources are read when the stream comes to them, and compute goes on beside them.
constexpr MemcpyAttributes kAttributes{kSourceInStreamOrder, {}, {}, kPreferOverlapWithCompute};

void whole(const std::vector<PlacedCopy>& copies, StreamHandle stream) {
  thread_local std::vector<DevicePtr> sources, targets;
  thread_local std::vector<size_t> sizes;
  sources.clear();
  targets.clear();
  sizes.clear();
  for (const PlacedCopy& c : copies) {
    sources.push_back(c.src);
    targets.push_back(c.dst);
    sizes.push_back(c.shape->row_bytes);
  }
  MemcpyAttributes attributes = kAttributes;
  size_t first = 0, failed = 0;
  check(api().MemcpyBatchAsync(targets.data(), sources.data(), sizes.data(), copies.size(), &attributes, &first, 1,
                               &failed, stream),
        "cuMemcpyBatchAsync");
}

void strided(const std::vector<PlacedCopy>& copies, StreamHandle stream) {
  thread_local std::vector<MemcpyBatchOp> ops;
  ops.clear();
  const auto operand = [](DevicePtr address, size_t pitch, size_t rows) {
    MemcpyOperand made{};
    made.type = kOperandPointer;
    made.address = address;
    made.row_length = pitch;
    made.layer_height = rows;
    return made;
  };
  for (const PlacedCopy& c : copies) {
    const CopyShape& s = *c.shape;
    const bool several = s.rows > 1;
    ops.push_back({operand(c.src, several ? s.src_pitch : s.row_bytes, s.rows),
                   operand(c.dst, several ? s.dst_pitch : s.row_bytes, s.rows),
                   {s.row_bytes, s.rows, 1},
                   kAttributes.source_order,
                   kAttributes.flags});
  }
  size_t failed = 0;
  check(api().Memcpy3DBatchAsync(ops.size(), ops.data(), &failed, 0, stream), "cuMemcpy3DBatchAsync");
}

void one(const PlacedCopy& c, StreamHandle stream) {
  const CopyShape& s = *c.shape;
  if (s.rows == 1) return check(api().MemcpyDtoDAsync(c.dst, c.src, s.row_bytes, stream), "cuMemcpyDtoDAsync");
  Memcpy2D copy{};
  copy.src_type = copy.dst_type = kMemoryTypeDevice;
  copy.src_device = c.src;
  copy.dst_device = c.dst;
  copy.src_pitch = s.src_pitch;
  copy.dst_pitch = s.dst_pitch;
  copy.width_bytes = s.row_bytes;
  copy.height = s.rows;
  check(api().Memcpy2DAsync(&copy, stream), "cuMemcpy2DAsync");
}

}  // namespace

void enqueue_together(const std::vector<PlacedCopy>& copies, StreamHandle stream) {
  const bool flat = std::all_of(copies.begin(), copies.end(), [](const PlacedCopy& c) { return c.shape->rows == 1; });
  if (flat && api().MemcpyBatchAsync != nullptr) return whole(copies, stream);
  if (!flat && api().Memcpy3DBatchAsync != nullptr) return strided(copies, stream);
  for (const PlacedCopy& c : copies) one(c, stream);
}

}  // namespace tide::cuda
