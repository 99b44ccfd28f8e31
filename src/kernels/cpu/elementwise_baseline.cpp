#define ISOMER_TARGET baseline
#include "kernels/cpu/elementwise_impl.h"
