// Products with plain weights.
#include <string>

#include "weights.h"

void multiply_plain(const Operands<Weights>::X *x, int64_t x_step, int64_t rows, const Weights *w,
                    int64_t length, float *c, int64_t c_step) {
    multiply_band<Weights>(x, x_step, rows, w, length, true, c, c_step);
}

std::string plain_products() { return products<Weights>(); }

// A matrix as products.h wants it. `out` has room for whole bands, and may be `rows`.
extern "C" void penstock_pack(Weights *out, const Weights *rows, int64_t num_rows, int64_t columns) {
    pack(out, rows, num_rows, columns);
}
