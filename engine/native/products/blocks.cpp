// Products with codes in blocks.
#include "formats.h"
#include "widened.h"

namespace {

Blocks codes_of(const Linear &w) {
    return {static_cast<const unsigned char *>(w.weight),
            w.scales,
            static_cast<const f16 *>(w.factors),
            static_cast<const unsigned char *>(w.table),
            w.bits,
            w.group,
            w.columns / w.group,
            w.offset,
            w.factor_columns,
            float(w.unit),
            w.has_minima != 0};
}

#if defined(PENSTOCK_FLOAT32)  // activations are not rounded
void multiply(const void *x, int64_t x_step, int64_t rows, const Linear &w, int64_t band, float *c, int64_t c_step) {
    multiply_widened(static_cast<const float *>(x), x_step / int64_t(sizeof(float)), rows, codes_of(w), w.columns,
                     nullptr, band, c, c_step);
}

const bool is_entered = enter_formats(kBlocks, {nullptr, nullptr, multiply});
#else
void multiply(const CodedRows &x, int64_t row, int64_t rows, const Linear &w, int64_t band, float *c, int64_t c_step) {
    multiply_blocks(x, row, rows, codes_of(w), band, c, c_step);
}

const bool is_entered = enter_formats(kBlocks, {multiply, code_instructions, nullptr});
#endif

}  // namespace

// Codes as blocks.h wants them.
extern "C" void penstock_pack_blocks(unsigned char *out, const unsigned char *low,
                                     const unsigned char *high, int64_t rows, int64_t columns,
                                     int64_t bits) {
    pack_blocks(out, low, high, rows, columns, bits);
}
