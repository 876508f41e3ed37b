// Products with codes, by what this processor has for them.
#include <string>

#include "blocks.h"
#include "grouped.h"
#include "grouped_tiles.h"

void multiply_codes(const CodedRows &x, int64_t row, int64_t rows, const Grouped &w, int64_t band,
                    float *c, int64_t c_step) {
#if defined(PENSTOCK_TILES)
    if (may_multiply_by_tiles(rows, w))
        return multiply_grouped_by_tiles(x, row, rows, w, band, c, c_step);
#endif
    multiply_grouped(x, row, rows, w, band, c, c_step);
}

void multiply_codes(const CodedRows &x, int64_t row, int64_t rows, const Blocks &w, int64_t band,
                    float *c, int64_t c_step) {
    multiply_blocks(x, row, rows, w, band, c, c_step);
}

std::string code_products() {
#if defined(PENSTOCK_TILES)
    constexpr unsigned kGroupedFormats = 0b11111;  // those of blocks.h are for vectors
    if (PENSTOCK_FORMATS & kGroupedFormats && may_use_tiles())
        return "AMX tiles of bytes, or " + code_instructions();
#endif
    return code_instructions();
}

// Codes as grouped.h and blocks.h want them.
extern "C" void penstock_pack_codes(unsigned char *out, const unsigned char *codes, int64_t rows,
                                    int64_t columns, int64_t bits, int64_t group) {
    pack_codes(out, codes, rows, columns, bits, group);
}
extern "C" void penstock_pack_blocks(unsigned char *out, const unsigned char *low,
                                     const unsigned char *high, int64_t rows, int64_t columns,
                                     int64_t bits) {
    pack_blocks(out, low, high, rows, columns, bits);
}
