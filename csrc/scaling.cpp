#include "scaling.h"

#include <cmath>
#include <stdexcept>
#include <string>

namespace tide {
namespace {

bool exact_reciprocal(float divisor) {
  int exponent = 0;
  return std::fabs(std::frexp(divisor, &exponent)) == 0.5f && std::isfinite(1.0f / divisor);
}

}  // namespace

Scaling Scaling::by(float divisor) {
  if (!std::isfinite(divisor) || divisor == 0.0f)
    throw std::invalid_argument("divisor must be finite and not zero as fp32; got " + std::to_string(divisor));
  if (divisor == 1.0f) return {};
  if (exact_reciprocal(divisor)) return {Scale::kMultiply, 1.0f / divisor};
  return {Scale::kDivide, divisor};
}

}  // namespace tide
