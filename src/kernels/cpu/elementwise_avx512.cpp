#define ISOMER_TARGET avx512
#include "kernels/cpu/elementwise_impl.h"
