// Products of activations in float32 with codes of grouped.h and blocks.h: the codes are widened to the numbers that
// they stand for, next to where these are multiplied, and activations stay as they are. What products.h says of a
// token's result holds here.
#pragma once
#include "blocks.h"

// Columns that are widened together: 16 KiB, which stay in the nearest cache. Groups have no more.
constexpr int64_t kWideColumns = 128;

// Four columns of (code - zero) * scale - minimum, of kLanes rows of a band.
inline void put_quads(float *out, Words quads, Floats zero, Floats scale, Floats minimum) {
    for (int i = 0; i < 4; ++i, quads = quads >> 8, out += kBand) {
        const Floats code = __builtin_convertvector((Ints)(quads & 0xffu), Floats);
        store(out, (code - zero) * scale - minimum);
    }
}

inline void widen_groups(const Grouped &w, int64_t band, int64_t first, int64_t last, float *out) {
    for (int64_t g = first; g < last; ++g, out += w.group * kBand)
        for (int64_t n = 0; n < kBand; n += kLanes) {
            const int64_t at = (band * w.groups + g) * kBand + n;
            const Floats scale = w.scales_at(at), zero = w.zeros ? load(w.zeros + at) : all(float(w.offset));
            const unsigned char *p = w.codes + (band * w.groups + g) * w.group_bytes() + 4 * n;
            for (int64_t k = 0; k < w.group; k += 32 / w.bits, p += 4 * kBand) {
                Words low = *reinterpret_cast<const Words *>(p), high = low >> 4 & 0x0f0f0f0fu;
                float *to = out + k * kBand + n;
                if (w.bits == 8) {
                    put_quads(to, low, zero, scale, Floats{});
                    continue;
                }
                low = low & 0x0f0f0f0fu;
                if (w.table) low = looked_up(w.table, low), high = looked_up(w.table, high);
                put_quads(to, low, zero, scale, Floats{});
                put_quads(to + 4 * kBand, high, zero, scale, Floats{});
            }
        }
}

inline void widen_groups(const Blocks &w, int64_t band, int64_t first, int64_t last, float *out) {
    alignas(64) float numbers[2 * kWideColumns / 16 * kBand];
    widen_numbers(w, band, first, last, numbers);
    with_kind(w, [&]<int kBits, bool kTable, bool kMinima>() {
        const unsigned char *p = w.codes + (band * w.groups + first) * w.group_bytes();
        const float *of_group = numbers;
        for (int64_t g = first; g < last; ++g, of_group += (kMinima ? 2 : 1) * kBand)
            for (int64_t k = 0; k < w.group; k += 16, p += kBand * 2 * kBits, out += 16 * kBand)
                for (int64_t n = 0; n < kBand; n += kLanes) {
                    const Floats scale = load(of_group + n), zero = all(kMinima ? 0.0f : float(w.offset));
                    const Floats minimum = kMinima ? load(of_group + kBand + n) : Floats{};
                    auto put_eight = [&]<int kPair>() {
                        Words low, high;
                        unpack_eight<kBits, kTable, kPair>(w, p, n, low, high);
                        put_quads(out + 8 * kPair * kBand + n, low, zero, scale, minimum);
                        put_quads(out + (8 * kPair + 4) * kBand + n, high, zero, scale, minimum);
                    };
                    put_eight.template operator()<0>();
                    put_eight.template operator()<1>();
                }
    });
}

// c[i][0..32) = x_i . w, for rows of x that are x_step apart, and a band of w. order: see Linear.
template <class Codes>
inline void multiply_widened(const float *x, int64_t x_step, int64_t rows, const Codes &w, int64_t columns,
                             const int32_t *order, int64_t band, float *c, int64_t c_step) {
    constexpr int64_t kOrdered = 32;
    alignas(64) float wide[kWideColumns * kBand], ordered[kOrdered * kWideColumns];
    const int64_t together = kWideColumns / w.group;
    for (int64_t g = 0; g < w.groups; g += together) {
        const int64_t begin = g * w.group, length = std::min(together * w.group, columns - begin);
        widen_groups(w, band, g, std::min(g + together, w.groups), wide);
        if (!order) multiply_band(x + begin, x_step, rows, wide, length, g == 0, c, c_step);
        for (int64_t row = 0; order && row < rows; row += kOrdered) {
            const int64_t count = std::min(kOrdered, rows - row);
            for (int64_t i = 0; i < count; ++i)
                for (int64_t k = 0; k < length; ++k)
                    ordered[i * kWideColumns + k] = x[(row + i) * x_step + order[begin + k]];
            multiply_band(ordered, kWideColumns, count, wide, length, g == 0, c + row * c_step, c_step);
        }
    }
}
