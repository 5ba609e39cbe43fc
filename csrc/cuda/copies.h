// Copies that are given to the device together, in no order among themselves. A link then goes from one copy to the next
// without the few microseconds that each costs by itself.
#pragma once

#include <cstdint>
#include <vector>

#include "driver.h"

namespace tide::cuda {

// `rows` rows of `row_bytes`; the pitches count only if there are several.
struct CopyShape {
  size_t row_bytes, rows, src_pitch, dst_pitch;
};

struct PlacedCopy {
  DevicePtr src, dst;
  const CopyShape* shape;
};

// Returns at once. The context of the stream's device is current. Drivers before CUDA 12.8 get them one by one.
void enqueue_together(const std::vector<PlacedCopy>& copies, StreamHandle stream);

}  // namespace tide::cuda
