#define ISOMER_TARGET avx2
#include "kernels/cpu/elementwise_impl.h"
