// Which formats of codes are compiled: each takes seconds. A bit for each, as library.py counts them.
#pragma once

#ifndef PENSTOCK_FORMATS
#define PENSTOCK_FORMATS 0
#endif
// Those of grouped.h and blocks.h, which read activations of 8 bits, and that of fp8.h, which does not.
#define PENSTOCK_INTEGER_FORMATS (PENSTOCK_FORMATS & 0x3ff)
#define PENSTOCK_FP8 (PENSTOCK_FORMATS >> 10 & 1)
