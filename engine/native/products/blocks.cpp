// Products with codes in blocks.
#include "blocks.h"

#include "formats.h"

namespace {

void multiply(const CodedRows &x, int64_t row, int64_t rows, const Linear &w, int64_t band, float *c,
              int64_t c_step) {
    const Blocks codes{static_cast<const unsigned char *>(w.weight),
                       w.scales,
                       static_cast<const f16 *>(w.factors),
                       static_cast<const unsigned char *>(w.table),
                       w.bits,
                       w.group,
                       w.columns / w.group,
                       w.offset,
                       w.has_minima != 0};
    multiply_blocks(x, row, rows, codes, band, c, c_step);
}

const bool is_entered = enter_formats(kBlocks, {multiply, code_instructions, nullptr});

}  // namespace

// Codes as blocks.h wants them.
extern "C" void penstock_pack_blocks(unsigned char *out, const unsigned char *low,
                                     const unsigned char *high, int64_t rows, int64_t columns,
                                     int64_t bits) {
    pack_blocks(out, low, high, rows, columns, bits);
}
