#define TIDE_VARIANT avx2
#include "kernels_body.h"
