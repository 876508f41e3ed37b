// Products with codes in groups.
#include "formats.h"
#include "grouped_tiles.h"

namespace {

void multiply(const CodedRows &x, int64_t row, int64_t rows, const Linear &w, int64_t band, float *c,
              int64_t c_step) {
    const Grouped codes{static_cast<const unsigned char *>(w.weight),
                        w.scales,
                        static_cast<const unsigned char *>(w.zeros),
                        static_cast<const unsigned char *>(w.table),
                        w.bits,
                        w.group,
                        (w.columns + w.group - 1) / w.group,
                        w.offset,
                        w.has_half_scales != 0};
    multiply_codes(x, row, rows, codes, band, c, c_step);
}

const bool is_entered = enter_formats(kGrouped, {multiply, grouped_products, nullptr});

}  // namespace

// Codes as grouped.h wants them.
extern "C" void penstock_pack_codes(unsigned char *out, const unsigned char *codes, int64_t rows,
                                    int64_t columns, int64_t bits, int64_t group) {
    pack_codes(out, codes, rows, columns, bits, group);
}
