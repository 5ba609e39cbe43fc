#define TIDE_VARIANT avx512
#include "kernels_body.h"
