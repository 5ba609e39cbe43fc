#define TIDE_VARIANT baseline
#include "kernels_body.h"
