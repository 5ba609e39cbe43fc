#include "sum.h"

#include <algorithm>
#include <cerrno>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

#include "clock.h"
#include "error.h"
#include "stream.h"

namespace tide::cuda {
namespace {

constexpr int64_t kDefaultSharedBytes = 48 << 10;

void between(const char* name, int64_t value, int64_t low, int64_t high) {
  if (value < low || value > high)
    throw std::invalid_argument(std::string(name) + " is " + std::to_string(value) + "; allowed: " +
                                std::to_string(low) + " to " + std::to_string(high));
}

[[noreturn]] void refuse(size_t op, const std::string& why) {
  throw std::invalid_argument("op " + std::to_string(op) + ": the sum kernel needs " + why);
}

int64_t index_of(const std::vector<int64_t>& list, int64_t item) {
  return std::find(list.begin(), list.end(), item) - list.begin();
}

int64_t in_elements(size_t op, int64_t bytes, int64_t item, const char* what) {
  if (bytes % item != 0)
    refuse(op, std::string(what) + " at a multiple of its " + std::to_string(item) + " bytes an element; it is at " +
                   std::to_string(bytes));
  return bytes / item;
}

}  // namespace

SumKind SumKind::of(const Op& op) { return {op[9] != 0, op[6], op[4], op[5], (op[8] & kAccumulate) != 0}; }

SumPlan::SumPlan(const tide::Program& table, const std::vector<SumRun>& runs, size_t kind, const SumKernel& kernel,
                 Device& device)
    : device_(device), kernel_(kernel) {
  if (kernel.function == 0) throw std::invalid_argument("function is 0");
  between("threads", kernel.threads, 1, 1024);
  between("shared_bytes", kernel.shared_bytes, 0, 1 << 20);
  between("ctas", kernel.ctas, 1, 1 << 20);
  between("max_pointers", kernel.max_pointers, 1, 256);
  between("tile", kernel.tile, 1, std::numeric_limits<int32_t>::max());
  between("extra_null_pointers", kernel.extra_null_pointers, 0, 16);
  for (const SumRun& run : runs) {
    std::vector<Launch> launches;
    if (run.kind == kind)
      for (const size_t op : run.ops)
        table.ops()[op][9] != 0 ? add_landing(table, op, launches) : add_staged(table, op, launches);
    runs_.push_back(std::move(launches));
  }
  const Current current(device_);
  if (kernel.shared_bytes > kDefaultSharedBytes)
    check(api().FuncSetAttribute(reinterpret_cast<FunctionHandle>(kernel.function), kMaxDynamicSharedBytes,
                                 static_cast<int>(kernel.shared_bytes)),
          "cuFuncSetAttribute");
  if (!words_.empty()) upload();
}

void SumPlan::add_staged(const tide::Program& table, size_t op_number, std::vector<Launch>& launches) {
  const Op& op = table.ops()[op_number];
  const int64_t elements = op[3], n = op[6];
  if ((op[8] & kAccumulate) != 0) refuse(op_number, "sums that do not accumulate");
  const int64_t src_item = dtype_bytes(op[4]), dst_item = dtype_bytes(op[5]);
  const Source* sources = table.sources().data() + op[7];
  const Source& gradient = sources[n - 1];
  int64_t stride = 0;
  for (int64_t i = 0; i + 1 < n; ++i) {
    if (sources[i].base != sources[0].base || sources[i].base == gradient.base)
      refuse(op_number, "staged sources in one area, followed by one source elsewhere");
    if (i == 1) stride = sources[1].offset - sources[0].offset;
    if (i > 1 && sources[i].offset - sources[i - 1].offset != stride)
      refuse(op_number, "staged sources at a constant distance from one to the next");
  }
  const int64_t staged_at = n > 1 ? in_elements(op_number, sources[0].offset, src_item, "a staged source") : 0;
  const int64_t stride_at = in_elements(op_number, stride, src_item, "a staged source");
  const int64_t gradient_at = in_elements(op_number, gradient.offset, src_item, "a gradient");
  const int64_t output_at = in_elements(op_number, op[2], dst_item, "an output");

  Launch like;
  like.staging = n > 1 ? sources[0].base : -1;
  like.output = op[1];
  like.scaled = (op[8] & kScaled) != 0;
  Launch& launch = launch_for(like, {gradient.base}, launches);
  const int64_t pointer = index_of(launch.pointers, gradient.base);
  for (int64_t at = 0; at < elements; at += kernel_.tile)
    add_tile({pointer, gradient_at + at, staged_at + at, stride_at, output_at + at,
              std::min(kernel_.tile, elements - at)}, launch);
}

void SumPlan::add_landing(const tide::Program& table, size_t op_number, std::vector<Launch>& launches) {
  const Op& op = table.ops()[op_number];
  const int64_t elements = op[3];
  if (op[4] != kFp32) refuse(op_number, "fp32 partials to land");
  const Source* sources = table.sources().data() + op[7];
  std::vector<int64_t> bases, offsets;
  for (const Source* s = sources; s < sources + op[6]; ++s) {
    bases.push_back(s->base);
    offsets.push_back(in_elements(op_number, s->offset, dtype_bytes(kFp32), "a partial"));
  }
  const int64_t output_at = in_elements(op_number, op[2], dtype_bytes(op[5]), "an output");

  Launch like;
  like.output = op[1];
  like.scaled = (op[8] & kScaled) != 0;
  Launch& launch = launch_for(like, bases, launches);
  for (int64_t at = 0; at < elements; at += kernel_.tile) {
    add_tile({output_at + at, std::min(kernel_.tile, elements - at)}, launch);
    for (size_t i = 0; i < bases.size(); ++i)
      words_.insert(words_.end(), {index_of(launch.pointers, bases[i]), offsets[i] + at});
  }
}

SumPlan::Launch& SumPlan::launch_for(const Launch& like, const std::vector<int64_t>& wanted,
                                     std::vector<Launch>& launches) const {
  const auto fits = [&](std::vector<int64_t> pointers) {
    for (const int64_t base : wanted)
      if (index_of(pointers, base) == static_cast<int64_t>(pointers.size())) pointers.push_back(base);
    return pointers;
  };
  if (!launches.empty()) {
    Launch& last = launches.back();
    std::vector<int64_t> pointers = fits(last.pointers);
    if (last.staging == like.staging && last.output == like.output && last.scaled == like.scaled &&
        pointers.size() <= static_cast<size_t>(kernel_.max_pointers)) {
      last.pointers = std::move(pointers);
      return last;
    }
  }
  launches.push_back(like);
  Launch& fresh = launches.back();
  fresh.first_tile = static_cast<int32_t>(n_tiles_);
  fresh.pointers = fits({});
  if (fresh.pointers.size() > static_cast<size_t>(kernel_.max_pointers))
    throw std::invalid_argument("max_pointers is " + std::to_string(kernel_.max_pointers) + "; a sum has sources in " +
                                std::to_string(fresh.pointers.size()) + " places");
  return fresh;
}

void SumPlan::add_tile(std::initializer_list<int64_t> words, Launch& launch) {
  if (n_tiles_ == static_cast<size_t>(std::numeric_limits<int32_t>::max()))
    throw std::invalid_argument("tile is " + std::to_string(kernel_.tile) + ", which gives more than 2**31 tiles");
  words_.insert(words_.end(), words);
  ++n_tiles_;
  ++launch.n_tiles;
}

void SumPlan::upload() {
  const size_t bytes = words_.size() * sizeof(int64_t);
  check(api().MemAlloc(&table_, bytes), "cuMemAlloc");
  Stream stream(device_.ordinal(), 0);
  Event done(device_);
  check(api().MemcpyHtoDAsync(table_, words_.data(), bytes, stream.handle()), "cuMemcpyHtoDAsync");
  done.record(stream.handle());
  if (!done.wait(now_ns() + patience_ns()))
    throw OsError(ETIMEDOUT, "device " + std::to_string(device_.ordinal()) + " did not take the tile table within " +
                                 std::to_string(patience_ns() / 1'000'000'000) + " s");
}

// Freeing device memory waits for the device, without limit if a wait is blocked: leak instead.
SumPlan::~SumPlan() {
  if (table_ == 0) return;
  try {
    if (!settle_for_teardown(device_)) return;
    const Current current(device_);
    (void)api().MemFree(table_);
  } catch (const std::exception&) {
    // The driver is going down.
  }
}

size_t SumPlan::n_launches() const {
  size_t n = 0;
  for (const auto& run : runs_) n += run.size();
  return n;
}

void SumPlan::launch(size_t run, const std::vector<uint64_t>& bases, const Scaling& scaling,
                     StreamHandle stream) const {
  const auto n_pointers = static_cast<size_t>(kernel_.max_pointers);
  const auto n_null = static_cast<size_t>(kernel_.extra_null_pointers);
  uint64_t pointers[256];
  uint64_t null_pointer = 0;
  void* arguments[7 + 256 + 16];
  for (const Launch& l : runs_[run]) {
    uint64_t table = table_;
    int32_t first = l.first_tile, count = l.n_tiles;
    uint64_t staging = l.staging < 0 ? 0 : bases[static_cast<size_t>(l.staging)];
    uint64_t output = bases[static_cast<size_t>(l.output)];
    Scaling applied = l.scaled ? scaling : Scaling{};
    int32_t divides = applied.scale == Scale::kDivide;
    size_t at = 0;
    for (void* a : {static_cast<void*>(&table), static_cast<void*>(&first), static_cast<void*>(&count),
                    static_cast<void*>(&staging), static_cast<void*>(&output), static_cast<void*>(&applied.factor),
                    static_cast<void*>(&divides)})
      arguments[at++] = a;
    for (size_t i = 0; i < n_pointers; ++i) {
      pointers[i] = i < l.pointers.size() ? bases[static_cast<size_t>(l.pointers[i])] : 0;
      arguments[at++] = &pointers[i];
    }
    for (size_t i = 0; i < n_null; ++i) arguments[at++] = &null_pointer;
    const auto ctas = static_cast<unsigned>(std::min<int64_t>(kernel_.ctas, count));
    check(api().LaunchKernel(reinterpret_cast<FunctionHandle>(kernel_.function), ctas, 1, 1,
                             static_cast<unsigned>(kernel_.threads), 1, 1,
                             static_cast<unsigned>(kernel_.shared_bytes), stream, arguments, nullptr),
          "cuLaunchKernel");
  }
}

}  // namespace tide::cuda
