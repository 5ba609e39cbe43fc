// One variant of multimem_landing.cu for the host, as the macros say; included once for each (fake_multicast.cpp).
#define TIDE_PASTE_(a, b) a##b
#define TIDE_PASTE(a, b) TIDE_PASTE_(a, b)
#define land_multimem TIDE_PASTE(TIDE_LANDING, _kernel)
namespace TIDE_LANDING {
#include "../../csrc/cuda/multimem_landing.cu"
void multimem_model(Address address, Word* words) { switch_sum(address, words); }
static const Enter entered(TIDE_NAME, land_multimem);
}  // namespace TIDE_LANDING
#undef land_multimem
#undef TIDE_LANDING
#undef TIDE_NAME
#undef TIDE_PASTE
#undef TIDE_PASTE_
