// Which formats of codes a library multiplies: each family is a source, which enters here what it has when the
// library is loaded. So no other source depends on which there are.
#pragma once
#include <cstdint>
#include <string>

#include "native/step/structs.h"

struct CodedRows;

// c[i][0..32) = x_i . w, for some rows and one band of w, in one of two ways.
struct Format {
    // grouped.h and blocks.h have this; they read activations of 8 bits: rows from `row` on.
    void (*multiply_codes)(const CodedRows &x, int64_t row, int64_t rows, const Linear &w, int64_t band,
                           float *c, int64_t c_step);
    std::string (*products)();  // what computes that, for people to read
    // fp8.h has this, and with float32 widened.h; they read rows of X, x_step bytes apart.
    void (*multiply_rows)(const void *x, int64_t x_step, int64_t rows, const Linear &w, int64_t band,
                          float *c, int64_t c_step);
};

// In the order of library.py: see Linear::format.
enum Formats { kPlain, kGrouped, kBlocks, kFp8, kNumFormats };

bool enter_formats(Formats formats, const Format &format);
