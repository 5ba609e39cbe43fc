#include "nccl_rma.h"

#include <stdexcept>
#include <string>
#include <utility>

#include "bounds.h"
#include "clock.h"

namespace tide::nccl {
namespace {

constexpr auto kAlone = Communicator::Peers::kAlone;

StreamHandle own(uint64_t stream) { return cuda::own_stream(stream); }

}  // namespace

Rma::Rma(std::shared_ptr<Communicator> comm, double timeout_s) : comm_(std::move(comm)), timeout_s_(timeout_s) {
  (void)deadline_after(timeout_s);
  if (comm_->limits().contexts == 0)
    throw std::invalid_argument("the communicator has no RMA contexts: puts need one");
  if (!comm_->properties().host_rma)
    throw NcclError("NCCL has no host RMA between the " + std::to_string(comm_->ranks()) +
                    " ranks of the rail: across hosts it needs RDMA network cards with GPUDirect, and CUDA 12.5 "
                    "(NCCL_DEBUG=INFO tells more)");
}

void Rma::check_place(int64_t peer, int64_t signal, int64_t context) const {
  between("peer", peer, 0, comm_->ranks() - 1);
  between("signal", signal, 0, comm_->limits().signals - 1);
  between("context", context, 0, comm_->limits().contexts - 1);
}

void Rma::put(int64_t peer, uint64_t source, int64_t bytes, const Window& from, const Window& to, int64_t offset,
              int64_t signal, int64_t context, uint64_t stream) {
  check_place(peer, signal, context);
  const StreamHandle on = own(stream);
  if (from.comm() != comm_ || to.comm() != comm_)
    throw std::invalid_argument("a put needs windows that are registered with the rail's own communicator");
  const auto room = static_cast<int64_t>(to.bytes());
  between("bytes", bytes, 0, room);
  between("offset", offset, 0, room - bytes);
  const uint64_t n = static_cast<uint64_t>(bytes);
  if (source < from.address() || source + n > from.address() + from.bytes())
    throw std::invalid_argument("the source of a put (" + std::to_string(bytes) +
                                " bytes) is not within the window that is said to hold it");
  if (bytes == 0) {  // nothing to copy, but the peer waits
    this->signal(peer, signal, context, stream);
    return;
  }
  comm_->run("ncclPutSignal", deadline_after(timeout_s_), kAlone, [&](CommHandle comm) {
    return api().PutSignal(reinterpret_cast<const void*>(source), n, kInt8, static_cast<int>(peer), to.handle(),
                           static_cast<size_t>(offset), static_cast<int>(signal), static_cast<int>(context), 0, comm,
                           on);
  });
}

void Rma::signal(int64_t peer, int64_t signal, int64_t context, uint64_t stream) {
  check_place(peer, signal, context);
  const StreamHandle on = own(stream);
  comm_->run("ncclSignal", deadline_after(timeout_s_), kAlone, [&](CommHandle comm) {
    return api().Signal(static_cast<int>(peer), static_cast<int>(signal), static_cast<int>(context), 0, comm, on);
  });
}

void Rma::wait(std::vector<WaitSignal> signals, int64_t tag, uint64_t stream) {
  if (signals.empty()) throw std::invalid_argument("a wait needs at least one signal");
  for (const WaitSignal& s : signals) {
    check_place(s.peer, s.signal, s.context);
    between("count", s.count, 1, INT_MAX);
  }
  const StreamHandle on = own(stream);
  Waiting w{tag, signals, nullptr, nullptr, 0};
  {
    std::lock_guard<std::mutex> hold(lock_);
    forget_what_is_over();
    for (auto* event : {&w.begun, &w.over}) {
      if (spare_.empty()) spare_.push_back(std::make_unique<cuda::Event>(comm_->device()));
      *event = std::move(spare_.back());
      spare_.pop_back();
    }
  }
  // Without the lock: whoever watches must not be held up by a call that NCCL does not return from.
  w.begun->record(on);
  comm_->run("ncclWaitSignal", deadline_after(timeout_s_), kAlone, [&](CommHandle comm) {
    return api().WaitSignal(static_cast<int>(signals.size()), signals.data(), comm, on);
  });
  w.over->record(on);
  std::lock_guard<std::mutex> hold(lock_);
  waits_.push_back(std::move(w));
}

void Rma::forget_what_is_over() {
  for (auto it = waits_.begin(); it != waits_.end();) {
    if (!it->over->done()) {
      ++it;
      continue;
    }
    spare_.push_back(std::move(it->begun));
    spare_.push_back(std::move(it->over));
    it = waits_.erase(it);
  }
}

std::vector<OverdueWait> Rma::overdue(double seconds) {
  std::lock_guard<std::mutex> hold(lock_);
  forget_what_is_over();
  std::vector<OverdueWait> found;
  const int64_t now = now_ns();
  for (Waiting& w : waits_) {
    if (!w.begun->done()) continue;
    if (w.since_ns == 0) w.since_ns = now;
    const double blocked = static_cast<double>(now - w.since_ns) / 1e9;
    if (blocked >= seconds) found.push_back({w.tag, w.signals, blocked});
  }
  return found;
}

size_t Rma::outstanding() {
  std::lock_guard<std::mutex> hold(lock_);
  forget_what_is_over();
  return waits_.size();
}

}  // namespace tide::nccl
