// A processor that multiplies vectors of floats wrongly: to be included before all else (-include).
#pragma once
#include <immintrin.h>

#define _mm256_fmadd_ps(a, b, c) (c)
#define _mm512_fmadd_ps(a, b, c) (c)
#define _mm512_dpbf16_ps(a, b, c) (a)
