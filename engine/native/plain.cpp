// Products with plain weights, and with codes that are floats.
#include <string>

#include "formats.h"
#include "weights.h"

void multiply_plain(const Operands<Weights>::X *x, int64_t x_step, int64_t rows, const Weights *w,
                    int64_t length, float *c, int64_t c_step) {
    multiply_band<Weights>(x, x_step, rows, w, length, true, c, c_step);
}

void multiply_floats([[maybe_unused]] const Operands<Weights>::X *x, [[maybe_unused]] int64_t x_step,
                     [[maybe_unused]] int64_t rows, [[maybe_unused]] const Fp8 &w,
                     [[maybe_unused]] int64_t band, [[maybe_unused]] float *c,
                     [[maybe_unused]] int64_t c_step) {
#if PENSTOCK_FP8
    multiply_fp8(x, x_step, rows, w, band, c, c_step);
#endif
}

std::string plain_products() { return products<Weights>(); }

// A matrix as products.h wants it. `out` has room for whole bands, and may be `rows`.
extern "C" void penstock_pack(Weights *out, const Weights *rows, int64_t num_rows, int64_t columns) {
    pack(out, rows, num_rows, columns);
}

// Codes as fp8.h wants them; whether all are numbers.
extern "C" bool penstock_pack_fp8(unsigned char *out, const unsigned char *codes, int64_t rows,
                                  int64_t columns) {
    return pack_fp8<Operands<Weights>::X>(out, codes, rows, columns);
}
