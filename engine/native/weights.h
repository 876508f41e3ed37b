// What a library is made for: one type of weights, and of keys and values. And what step.cpp calls of the other
// sources, which are compiled at the same time as it.
#pragma once
#include <string>

#include "attention.h"
#include "coded_runs.h"
#include "fp8.h"
#include "products.h"

#ifndef PENSTOCK_WEIGHTS
#define PENSTOCK_WEIGHTS bf16
#endif
using Weights = PENSTOCK_WEIGHTS;

#if defined(PENSTOCK_CODED_KV)
using Runs = CodedRuns;
#else
using Runs = PlainRuns<Weights>;
#endif
extern template class Attention<Runs>;

// c[i][0..32) = x_i . w, as multiply_band.
void multiply_plain(const Operands<Weights>::X *x, int64_t x_step, int64_t rows, const Weights *w,
                    int64_t length, float *c, int64_t c_step);
// The same with codes, as multiply_fp8.
void multiply_floats(const Operands<Weights>::X *x, int64_t x_step, int64_t rows, const Fp8 &w,
                     int64_t band, float *c, int64_t c_step);
// What computes them, for people to read.
std::string plain_products();
