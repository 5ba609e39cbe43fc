#include "multimem_kernel.h"

#include <algorithm>
#include <limits>
#include <stdexcept>

#include "bounds.h"
#include "stream.h"

namespace tide::cuda {
namespace {

constexpr int64_t kMaxAddresses = 256;

}  // namespace

Kernel::Kernel(int64_t device, std::string_view image, const std::string& name) : device_(Device::get(device)) {
  const Api& cu = api();
  if (cu.ModuleLoadData == nullptr || cu.ModuleGetFunction == nullptr || cu.ModuleUnload == nullptr)
    throw CudaError("the driver cannot load modules");
  if (image.empty()) throw std::invalid_argument("image is empty");
  const std::string copy(image);  // PTX has to end with a null character
  const Current current(device_);
  check(cu.ModuleLoadData(&module_, copy.c_str()), "cuModuleLoadData");
  const Result r = cu.ModuleGetFunction(&function_, module_, name.c_str());
  if (r != kSuccess) (void)cu.ModuleUnload(module_);
  check(r, "cuModuleGetFunction");
}

Kernel::~Kernel() {
  try {
    if (!settle_for_teardown(device_)) return;  // it may still run
    const Current current(device_);
    (void)api().ModuleUnload(module_);
  } catch (const std::exception&) {
    // The driver is going down.
  }
}

void Kernel::launch(const Tiles& tiles, int64_t ctas, int64_t threads, uint64_t stream) const {
  const StreamHandle on = own_stream(stream);
  constexpr int64_t most = std::numeric_limits<int32_t>::max();
  between("ctas", ctas, 1, 1 << 20);
  between("threads", threads, 1, 1024);
  between("first", tiles.first, 0, most);
  between("count", tiles.count, 0, most - tiles.first);
  between("addresses", static_cast<int64_t>(tiles.addresses.size()), 1, kMaxAddresses);
  if (tiles.count == 0) return;
  uint64_t table = tiles.table, staging = tiles.staging, output = tiles.output;
  int32_t first = static_cast<int32_t>(tiles.first), count = static_cast<int32_t>(tiles.count);
  float factor = tiles.scaling.factor;
  int32_t divides = tiles.scaling.scale == Scale::kDivide;
  std::vector<uint64_t> addresses = tiles.addresses;
  std::vector<void*> arguments = {&table, &first, &count, &staging, &output, &factor, &divides};
  for (uint64_t& a : addresses) arguments.push_back(&a);
  const Current current(device_);
  check(api().LaunchKernel(function_, static_cast<unsigned>(std::min(ctas, tiles.count)), 1, 1,
                           static_cast<unsigned>(threads), 1, 1, 0, on, arguments.data(), nullptr),
        "cuLaunchKernel");
}

}  // namespace tide::cuda
