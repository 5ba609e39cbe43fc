// How the sums of a call are divided: on the CPU and on GPUs alike, so that they give the same bits.
#pragma once

namespace tide {

enum class Scale { kNone, kMultiply, kDivide };

struct Scaling {
  Scale scale = Scale::kNone;
  float factor = 1.0f;  // 1 for kNone

  // What divides by `divisor` with one rounding: multiplying by the reciprocal where that is exact (it is faster, and
  // gives the same bits), else dividing. Throws std::invalid_argument for zero and what is not finite.
  static Scaling by(float divisor);
};

}  // namespace tide
