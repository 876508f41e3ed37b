// Products with codes in groups.
#include "formats.h"
#include "grouped_tiles.h"
#include "widened.h"

namespace {

Grouped codes_of(const Linear &w) {
    return {static_cast<const unsigned char *>(w.weight),
            w.scales,
            static_cast<const unsigned char *>(w.zeros),
            static_cast<const unsigned char *>(w.table),
            w.bits,
            w.group,
            (w.columns + w.group - 1) / w.group,
            w.offset,
            w.has_half_scales != 0};
}

#if defined(PENSTOCK_FLOAT32)  // activations are not rounded
void multiply(const void *x, int64_t x_step, int64_t rows, const Linear &w, int64_t band, float *c, int64_t c_step) {
    multiply_widened(static_cast<const float *>(x), x_step / int64_t(sizeof(float)), rows, codes_of(w), w.columns,
                     w.order, band, c, c_step);
}

const bool is_entered = enter_formats(kGrouped, {nullptr, nullptr, multiply});
#else
void multiply(const CodedRows &x, int64_t row, int64_t rows, const Linear &w, int64_t band, float *c, int64_t c_step) {
    multiply_codes(x, row, rows, codes_of(w), band, c, c_step);
}

const bool is_entered = enter_formats(kGrouped, {multiply, grouped_products, nullptr});
#endif

}  // namespace

// Codes as grouped.h wants them.
extern "C" void penstock_pack_codes(unsigned char *out, const unsigned char *codes, int64_t rows,
                                    int64_t columns, int64_t bits, int64_t group) {
    pack_codes(out, codes, rows, columns, bits, group);
}
