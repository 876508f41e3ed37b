// Products with codes that are floats, for one type of weights.
#include "fp8.h"

#include "formats.h"

namespace {

using X = Operands<PENSTOCK_WEIGHTS>::X;

void multiply(const void *x, int64_t x_step, int64_t rows, const Linear &w, int64_t band, float *c,
              int64_t c_step) {
    const Fp8 weights{static_cast<const unsigned char *>(w.weight), static_cast<const float *>(w.scales),
                      w.columns, w.group, w.is_by_band != 0};
    multiply_fp8(static_cast<const X *>(x), x_step / int64_t(sizeof(X)), rows, weights, band, c, c_step);
}

const bool is_entered = enter_formats(kFp8, {nullptr, nullptr, multiply});

}  // namespace

// Codes as fp8.h wants them; whether all are numbers.
extern "C" bool penstock_pack_fp8(unsigned char *out, const unsigned char *codes, int64_t rows,
                                  int64_t columns) {
    return pack_fp8<X>(out, codes, rows, columns);
}
