// Whether the headers multiply what they say, for each type and format of weights; a program, so that an emulator can
// run it too. Ends with 1 and a line for the first product that is wrong; the last line names what multiplied, and has
// a number that depends on each bit of the products with codes.
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#include "native/products/blocks.h"
#include "native/products/fp8.h"
#include "native/products/grouped_tiles.h"
#include "native/products/products.h"
#include "native/products/widened.h"

namespace {

std::uint64_t bits_of_codes = 0;

void note(const std::vector<float> &results) {
    for (const float result : results)
        bits_of_codes = (bits_of_codes ^ std::bit_cast<std::uint32_t>(result)) * 0x9e3779b97f4a7c15u;
}

float draw() { return float(std::rand()) / float(RAND_MAX) - 0.5f; }

template <class T> bool is_right(const char *name, int64_t rows, int64_t columns, int64_t length) {
    using X = typename Operands<T>::X;
    constexpr int64_t spare = 32;
    const int64_t x_step = length + 32;
    std::vector<T> w(banded_rows(columns) * length), packed(w.size());
    std::vector<X> x((rows + spare) * x_step);
    for (T &value : w) store(&value, draw());
    for (X &value : x) store(&value, draw());
    pack(packed.data(), w.data(), columns, length);
    const int64_t c_step = banded_rows(columns);
    std::vector<float> together((rows + spare) * c_step), alone((1 + spare) * c_step);
    const TileScope tiles;
    for (int64_t n = 0; n < columns; n += kBand)
        multiply_band<T>(x.data(), x_step, rows, packed.data() + n * length, length, true,
                         together.data() + n, c_step);
    for (int64_t row = 0; row < rows; ++row) {
        for (int64_t n = 0; n < columns; n += kBand)
            multiply_band<T>(x.data() + row * x_step, x_step, 1, packed.data() + n * length, length,
                             true, alone.data() + n, c_step);
        for (int64_t n = 0; n < columns; ++n) {
            double expected = 0;
            for (int64_t k = 0; k < length; ++k)
                expected += double(widen(x[row * x_step + k])) * double(widen(w[n * length + k]));
            const float result = together[row * c_step + n];
            if (std::abs(expected - result) < 1e-4 * std::sqrt(double(length)) && result == alone[n])
                continue;
            std::printf("%s: %ld rows, %ld columns, length %ld: row %ld, column %ld is %g, alone %g, "
                        "should be %g\n", name, long(rows), long(columns), long(length), long(row),
                        long(n), double(result), double(alone[n]), expected);
            return false;
        }
    }
    return true;
}

template <class T> bool all_right(const char *name) {
    for (int64_t length : {2, 30, 64, 130, 2086})
        for (int64_t rows : {1, 2, 3, 5, 8, 12, 13, 16, 17, 31, 33, 50})
            if (!is_right<T>(name, rows, rows % 2 ? 32 : 70, length)) return false;
    return true;
}

// Codes of some numbers of bits, in groups; `flags` says what else there is.
enum Flags { kPlain, kZeroed, kTabled, kWide };

bool codes_are_right(int64_t bits, int64_t group, int64_t rows, int64_t columns, int64_t length,
                     Flags flags) {
    const int64_t groups = (length + group - 1) / group, row_bytes = (length * bits + 7) / 8;
    std::vector<unsigned char> codes(columns * row_bytes),
        packed(banded_rows(columns) * groups * group * bits / 8);
    std::vector<unsigned char> zeros(banded_rows(columns) * groups), table(kTableBytes);
    std::vector<float> scales(zeros.size()), x(length);
    std::vector<f16> half_scales(zeros.size());
    for (auto &code : codes) code = (unsigned char)std::rand();
    const bool is_extreme = rows == 8;  // sums are as large as any
    if (is_extreme)
        for (auto &code : codes) code = (unsigned char)(code & 1 ? bits == 8 ? 127 : 255 : bits == 8 ? 128 : 0);
    for (auto &zero : zeros) zero = (unsigned char)(std::rand() & (bits == 8 ? 255 : 15));
    for (std::size_t i = 0; i < table.size(); ++i) table[i] = (unsigned char)(i % 16 * i % 16 + 3);
    for (std::size_t i = 0; i < scales.size(); ++i) {
        store(&half_scales[i], draw());
        scales[i] = widen(half_scales[i]);
    }
    pack_codes(packed.data(), codes.data(), columns, length, bits, group);
    Grouped w{packed.data(), half_scales.data(), nullptr, nullptr, bits, group, groups,
              bits == 8 ? 128 : 8, true};
    if (flags == kZeroed) w.zeros = zeros.data();
    if (flags == kTabled) w.table = table.data(), w.offset = 100;
    if (flags == kWide) w.scales = scales.data(), w.has_half_scales = false;
    const int64_t bytes = CodedRows::bytes(length, group);
    std::vector<unsigned char> memory((rows + 32) * bytes);
    std::vector<double> rounded(rows * length);
    std::vector<float> floats(rows * length);
    for (int64_t row = 0; row < rows; ++row) {
        for (float &value : x) value = is_extreme ? std::copysign(0.5f, draw()) : draw();
        std::copy(x.begin(), x.end(), &floats[row * length]);
        code_row(x.data(), length, group, memory.data() + row * bytes);
        const CodedRows coded = CodedRows::at(memory.data(), length, group);
        for (int64_t k = 0; k < length; ++k) {
            rounded[row * length + k] = double(coded.codes(row)[k]) * coded.scales(row)[k / group];
            if (std::abs(rounded[row * length + k] - x[k]) > 0.51 * coded.scales(row)[k / group]) {
                std::printf("%g is coded as %g\n", double(x[k]), rounded[row * length + k]);
                return false;
            }
        }
    }
    // What the scale or zero of a row and a group is, from bands.
    auto in_band = [&](int64_t n, int64_t g) { return (n / kBand * groups + g) * kBand + n % kBand; };
    std::vector<float> together(rows * kBand), alone(kBand), exact(rows * kBand);
    const TileScope tiles;
    for (int64_t band = 0; band < banded_rows(columns) / kBand; ++band) {
        multiply_widened(floats.data(), length, rows, w, length, nullptr, band, exact.data(), kBand);
        const CodedRows coded = CodedRows::at(memory.data(), length, group);
        multiply_codes(coded, 0, rows, w, band, together.data(), kBand);
        note(together);
        for (int64_t row = 0; row < rows; ++row) {
            multiply_codes(coded, row, 1, w, band, alone.data(), kBand);
            for (int64_t n = band * kBand; n < std::min(columns, band * kBand + kBand); ++n) {
                double expected = 0, widened = 0;
                for (int64_t k = 0; k < length; ++k) {
                    const int64_t g = k / group;
                    int code;
                    if (bits == 8)
                        code = int((signed char)codes[n * row_bytes + k]) + 128;
                    else
                        code = codes[n * row_bytes + k / 2] >> 4 * (k % 2) & 15;
                    if (flags == kTabled) code = table[code];
                    const int zero = flags == kZeroed ? zeros[in_band(n, g)] : int(w.offset);
                    expected += rounded[row * length + k] * (code - zero) * scales[in_band(n, g)];
                    widened += double(floats[row * length + k]) * (code - zero) * scales[in_band(n, g)];
                }
                const float result = together[row * kBand + n % kBand];
                const double tolerance = 1e-5 * 255 * std::sqrt(double(length));
                if (std::abs(expected - result) < tolerance && result == alone[n % kBand] &&
                    std::abs(widened - exact[row * kBand + n % kBand]) < tolerance)
                    continue;
                std::printf("%ld bits, groups of %ld, %ld rows, %ld columns, length %ld, %d: row %ld, "
                            "column %ld is %g, alone %g, should be %g; with float32 %g, should be %g\n",
                            long(bits), long(group), long(rows), long(columns), long(length), int(flags),
                            long(row), long(n), double(result), double(alone[n % kBand]), expected,
                            double(exact[row * kBand + n % kBand]), widened);
                return false;
            }
        }
    }
    return true;
}

bool all_codes_are_right() {
    for (int64_t bits : {8, 4})
        for (int64_t group : {8, 32, 72, 128})
            for (int64_t length : {8, 64, 130, 2086})
                for (int64_t rows : {1, 2, 3, 4, 5, 6, 7, 8, 13, 40})
                    for (Flags flags : {kPlain, kZeroed, kTabled, kWide})
                        if (!(bits == 8 && flags == kTabled) &&
                            !codes_are_right(bits, group, rows, rows % 2 ? 32 : 70, length, flags))
                            return false;
    return true;
}

// Of a format of blocks: whether scales have factors, weights minima, and codes stand for numbers of a table.
struct Format {
    int64_t bits, group;
    bool has_factors, has_minima, has_table;
};

bool blocks_are_right(const Format &of, int64_t rows, int64_t columns, int64_t length) {
    const int64_t groups = length / of.group, each = of.has_minima ? 2 : 1;
    const int64_t high_bits = of.bits - 4, padded = banded_rows(columns);
    std::vector<unsigned char> low(columns * length / 2), high(columns * length * high_bits / 8 + 8),
        packed(padded * length * of.bits / 8), table(kTableBytes);
    for (auto *bytes : {&low, &high})
        for (auto &byte : *bytes) byte = (unsigned char)std::rand();
    for (std::size_t i = 0; i < table.size(); ++i) table[i] = (unsigned char)(i % 16 * i % 16 + 3);
    pack_blocks(packed.data(), low.data(), high.data(), columns, length, of.bits);
    Blocks w{packed.data(), nullptr, nullptr, of.has_table ? table.data() : nullptr, of.bits, of.group,
             groups, of.has_minima ? 0 : of.has_table ? 100 : 1 << (of.bits - 1),
             of.group < 128 && rows % 2 ? 128 : 256, rows % 2 ? 0.125f : 1.0f, of.has_minima};
    std::vector<std::int8_t> scale_codes(padded * groups * each);
    std::vector<f16> scales(scale_codes.size()), factors(padded * w.factors_each() * each);
    for (auto &code : scale_codes) code = std::int8_t(std::rand());
    for (auto &scale : scales) store(&scale, draw());
    for (auto &factor : factors) store(&factor, draw() / 64);
    w.scales = of.has_factors ? static_cast<const void *>(scale_codes.data()) : scales.data();
    if (of.has_factors) w.factors = factors.data();
    // The scale, or the minimum, of a row and a group.
    auto number = [&](int64_t n, int64_t g, int64_t part) {
        auto at = [&](int64_t count, int64_t i) {
            return ((n / kBand * count + i) * each + part) * kBand + n % kBand;
        };
        if (!of.has_factors) return double(widen(scales[at(groups, g)]));
        const int64_t factor = at(w.factors_each(), g * of.group / w.factor_columns);
        return double(scale_codes[at(groups, g)]) * double(widen(factors[factor])) * double(w.unit);
    };
    const int64_t bytes = CodedRows::bytes(length, of.group);
    std::vector<unsigned char> memory(rows * bytes);
    std::vector<float> x(length), together(rows * kBand), alone(kBand), exact(rows * kBand), floats;
    for (int64_t row = 0; row < rows; ++row) {
        for (float &value : x) value = draw();
        floats.insert(floats.end(), x.begin(), x.end());
        code_row(x.data(), length, of.group, memory.data() + row * bytes);
    }
    const CodedRows coded = CodedRows::at(memory.data(), length, of.group);
    for (int64_t band = 0; band < padded / kBand; ++band) {
        multiply_widened(floats.data(), length, rows, w, length, nullptr, band, exact.data(), kBand);
        multiply_blocks(coded, 0, rows, w, band, together.data(), kBand);
        note(together);
        for (int64_t row = 0; row < rows; ++row) {
            multiply_blocks(coded, row, 1, w, band, alone.data(), kBand);
            for (int64_t n = band * kBand; n < std::min(columns, band * kBand + kBand); ++n) {
                double expected = 0, size = 0, widened = 0;
                for (int64_t k = 0; k < length; ++k) {
                    const int64_t at = n * length + k, g = k / of.group;
                    int code = low[at / 2] >> 4 * (at % 2) & 15;
                    if (of.has_table) code = table[code];
                    if (high_bits)
                        code |= (high[at * high_bits / 8] >> at * high_bits % 8 &
                                 ((1 << high_bits) - 1)) << 4;
                    double value = number(n, g, 0) * double(code - int(w.offset));
                    if (of.has_minima) value -= number(n, g, 1);
                    widened += value * double(floats[row * length + k]);
                    value *= double(coded.codes(row)[k]) * double(coded.scales(row)[g]);
                    expected += value;
                    size += std::abs(value);
                }
                const float result = together[row * kBand + n % kBand];
                const float other = exact[row * kBand + n % kBand];
                if (std::abs(expected - result) <= 1e-5 * size && result == alone[n % kBand] &&
                    std::abs(widened - other) <= 1e-5 * size)
                    continue;
                std::printf("blocks of %ld bits, groups of %ld, %d %d %d, %ld rows, %ld columns, length "
                            "%ld: row %ld, column %ld is %g, alone %g, should be %g; with float32 %g, should "
                            "be %g\n", long(of.bits), long(of.group), of.has_factors, of.has_minima,
                            of.has_table, long(rows), long(columns), long(length), long(row), long(n),
                            double(result), double(alone[n % kBand]), expected, double(other), widened);
                return false;
            }
        }
    }
    return true;
}

bool all_blocks_are_right() {
    for (const Format &of : {Format{4, 32, true, true, false}, {4, 32, false, true, false},
                             {4, 32, true, false, true}, {5, 32, true, true, false},
                             {5, 16, true, true, false}, {5, 32, false, true, false},
                             {5, 32, false, false, false}, {6, 16, true, false, false}})
        for (int64_t length : {32, 256, 1280, 2144})
            for (int64_t rows : {1, 2, 3, 4, 5, 6, 7, 8, 13})
                if (!blocks_are_right(of, rows, rows % 2 ? 32 : 70, length)) return false;
    return true;
}

// What a code of e4m3 stands for, from its description: a sign, four bits of exponent, three of fraction.
double value_of(unsigned char code) {
    const int exponent = code >> 3 & 15, fraction = code & 7;
    const double size = exponent ? std::ldexp(8 + fraction, exponent - 10) : std::ldexp(fraction, -9);
    return code & 128 ? -size : size;
}

bool fp8_is_right(int64_t height, int64_t group, int64_t rows, int64_t columns, int64_t length) {
    using X = typename Operands<bf16>::X;
    constexpr int64_t spare = 32;
    const int64_t x_step = length + 32, groups = (length + group - 1) / group;
    std::vector<unsigned char> codes(columns * length), packed(banded_rows(columns) * length);
    std::vector<X> x((rows + spare) * x_step);
    std::vector<float> scales(banded_rows(columns) / height * groups);
    for (auto &code : codes)
        do code = (unsigned char)std::rand();
        while ((code & 127) == 127);
    for (X &value : x) store(&value, draw());
    for (float &scale : scales) scale = 256 * draw();
    if (!pack_fp8<X>(packed.data(), codes.data(), columns, length)) return false;
    const Fp8 w{packed.data(), scales.data(), length, group, height == kBand};
    std::vector<float> together((rows + spare) * kBand), alone((1 + spare) * kBand);
    const TileScope tiles;
    for (int64_t band = 0; band < banded_rows(columns) / kBand; ++band) {
        multiply_fp8(x.data(), x_step, rows, w, band, together.data(), kBand);
        for (int64_t row = 0; row < rows; ++row) {
            multiply_fp8(x.data() + row * x_step, x_step, 1, w, band, alone.data(), kBand);
            for (int64_t n = band * kBand; n < std::min(columns, band * kBand + kBand); ++n) {
                double expected = 0, size = 0;
                for (int64_t k = 0; k < length; ++k) {
                    const int64_t g = band * groups + k / group;
                    const double scale = scales[height == kBand ? g : g * kBand + n % kBand] / 256.0;
                    const double product = double(widen(x[row * x_step + k])) *
                                           value_of(codes[n * length + k]) * scale;
                    expected += product;
                    size += std::abs(product);
                }
                const float result = together[row * kBand + n % kBand];
                if (std::abs(expected - result) <= 1e-5 * size && result == alone[n % kBand]) continue;
                std::printf("fp8 in groups of %ld, %ld rows, %ld columns, length %ld: row %ld, column "
                            "%ld is %g, alone %g, should be %g\n", long(group), long(rows),
                            long(columns), long(length), long(row), long(n), double(result),
                            double(alone[n % kBand]), expected);
                return false;
            }
        }
    }
    return true;
}

bool all_fp8_is_right() {
    for (int64_t height : {int64_t(1), kBand})
        for (int64_t group : {6, 128, 3000})
            for (int64_t length : {2, 130, 1286})
                for (int64_t rows : {1, 2, 5, 13, 17, 40, 200})
                    if (!fp8_is_right(height, group, rows, rows % 2 ? 32 : 70, length)) return false;
    return true;
}

}  // namespace

int main() {
    const bool right = all_right<float>("float32") && all_right<f16>("float16") &&
                       all_right<bf16>("bfloat16") && all_codes_are_right() &&
                       all_blocks_are_right() && all_fp8_is_right();
    std::printf("%s; codes: %s; their bits: %016llx\n", products<bf16>().c_str(), grouped_products().c_str(),
                (unsigned long long)bits_of_codes);
    return right ? 0 : 1;
}
