// Streams, the order between them, and waiting for the device for a limited time.
#pragma once

#include <cstdint>
#include <memory>

#include "driver.h"

namespace tide::cuda {

class Stream {
 public:
  // Lower is more urgent; values beyond what the device has are brought into its range.
  Stream(int64_t device, int64_t priority);
  ~Stream();  // work already given to it still runs
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  int device() const { return device_.ordinal(); }
  StreamHandle handle() const { return handle_; }
  uint64_t number() const { return reinterpret_cast<uint64_t>(handle_); }

 private:
  Device& device_;
  StreamHandle handle_ = nullptr;
};

constexpr int64_t kMostUrgent = INT32_MIN;

// An event without timing.
class Event {
 public:
  explicit Event(Device& device);
  ~Event();
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  void record(StreamHandle stream);
  bool done() const;                      // whether what was recorded is through
  bool wait(int64_t deadline_ns) const;  // polls with short sleeps; false at the deadline

 private:
  Device& device_;
  EventHandle handle_ = nullptr;
};

// Throws unless `stream` is a stream of one's own: null, the legacy and the per-thread default stream
// either synchronise with everything or mean another stream on every thread.
StreamHandle own_stream(uint64_t stream);

// `to` continues only after what `from` holds now. Either may be a default stream, as torch's current one is.
void order(uint64_t from, uint64_t to);

// A plain copy from device memory to device memory on `stream`.
void copy(uint64_t target, uint64_t source, int64_t bytes, uint64_t stream);

// How long the host may wait for what streams hold up, which may be waits for peers: beyond what a peer may take, since
// those waits have a bound of their own. A minute unless set; of the whole process, and never less than it was.
int64_t patience_ns();
void be_patient(double seconds);

// Waits until everything given to the device by this process so far is through; false after `limit_ns`.
// A driver that cannot tell (older than 12.5) is waited for without a limit of ours: there, waits on peers
// end when the watchdog releases them.
bool settle(Device& device, int64_t limit_ns);

// The same for destructors, which must not pile up delays: two seconds, and once that was in vain, hardly any.
bool settle_for_teardown(Device& device);

}  // namespace tide::cuda
