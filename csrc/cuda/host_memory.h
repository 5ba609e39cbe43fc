// Pinned memory of the host that streams copy to and from, and words by which a stream tells threads of the host how far
// it has come. Those threads need nothing of the driver, which a call that waits for the device may be holding.
#pragma once

#include <cstdint>
#include <optional>

#include "memory.h"

namespace tide::cuda {

// Whether a word of host memory has come to `value`, of 32 bits and going round; polls for so long, with short sleeps.
bool word_comes_to(const uint32_t* word, uint32_t value, double seconds);

class HostMemory {
 public:
  // `marks`: how many words.
  HostMemory(int64_t device, int64_t bytes, int64_t marks);
  ~HostMemory();  // waits a while for the device, and leaks rather than free what a copy may still use
  HostMemory(const HostMemory&) = delete;
  HostMemory& operator=(const HostMemory&) = delete;

  uint64_t address() const { return reinterpret_cast<uint64_t>(page_.words()); }
  int64_t bytes() const { return bytes_; }
  size_t pinned_bytes() const { return page_.bytes() + (marks_ ? marks_->bytes() : 0); }

  // Copies from device memory to byte `offset` here, or from there to device memory. Return at once.
  void fetch(int64_t offset, uint64_t source, int64_t bytes, uint64_t stream);
  void store(uint64_t target, int64_t offset, int64_t bytes, uint64_t stream);
  // Sets a word when the stream has come here and all before is visible.
  void mark(int64_t index, uint32_t value, uint64_t stream);
  // Whether a word has come to `value`; waits for it for so long.
  bool marked(int64_t index, uint32_t value, double seconds) const;

 private:
  const uint8_t* at(int64_t offset, int64_t bytes) const;

  Device& device_;
  int64_t bytes_, n_marks_;
  HostPage page_;
  std::optional<HostPage> marks_;
};

}  // namespace tide::cuda
