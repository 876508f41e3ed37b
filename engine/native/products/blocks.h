// Products with weights in blocks, as GGUF has them: y = x W^T, where
// W[n, k] = scale[n, g] * (code[n, k] - offset) - minimum[n, g], and g is the group of k.
//
// They differ from grouped.h in what is stored: codes may have 5 or 6 bits, scales may be codes of 8 bits
// themselves, times a factor for the groups of 256 columns or fewer, and a minimum is subtracted. Activations,
// and what a token's result depends on, are as there.
//
// Of the codes, 16 along k lie together: the low 4 bits as in grouped.h, in two lines of [32][4] bytes, and
// after them the bits above: of 6 bits, [32][4] bytes, in byte j of which are those of the numbers j, 4 + j,
// 8 + j and 12 + j, the first lowest; of 5 bits, [32][2] bytes, in byte j of which are those of the numbers
// j, j + 2, j + 4 and so on. So a block takes as much memory as in the file, but for the scales and minima of
// Q4_K and Q5_K, which have 8 bits each here, and 6 there.
#pragma once
#include "grouped.h"

// A matrix in bands. Scales of a group are [32], and after them the minima are, if there are such; so are
// factors.
struct Blocks {
    const unsigned char *codes;
    const void *scales;          // of int8, with factors; else of f16
    const f16 *factors;          // or null
    const unsigned char *table;  // as in Grouped
    int64_t bits, group, groups, offset;
    int64_t factor_columns;  // that have a factor in common: a divisor of 256
    float unit;              // what all factors are multiplied by
    bool has_minima;

    int64_t group_bytes() const { return kBand * group * bits / 8; }
    int64_t factor_groups() const { return factor_columns / group; }
    int64_t factors_each() const { return (groups + factor_groups() - 1) / factor_groups(); }
};

// Four halves of bytes, the first lowest, each in a byte.
inline std::uint32_t in_bytes(std::uint64_t halves) {
    std::uint32_t x = halves & 0xffff;
    x = (x | x << 8) & 0x00ff00ff;
    return (x | x << 4) & 0x0f0f0f0f;
}
// Every second bit, moved together.
inline std::uint32_t every_second(std::uint32_t bits) {
    bits &= 0x5555;
    bits = (bits | bits >> 1) & 0x3333;
    bits = (bits | bits >> 2) & 0x0f0f;
    return (bits | bits >> 4) & 0x00ff;
}

// Packs rows of codes: `low`, the low 4 bits, two to a byte, and `high`, the bits above, eight or four to a
// byte, the first always lowest. There are whole groups, whose sizes are multiples of 16.
inline void pack_blocks(unsigned char *out, const unsigned char *low, const unsigned char *high,
                        int64_t rows, int64_t columns, int64_t bits) {
    const int64_t high_bytes = (bits - 4) * columns / 8;
    for (int64_t first = 0; first < rows; first += kBand)
        for (int64_t k = 0; k < columns; k += 16, out += kBand * 2 * bits)
            for (int64_t n = 0; n < kBand; ++n) {
                std::uint64_t halves = 0;
                std::uint32_t above = 0;
                if (first + n < rows) {
                    std::memcpy(&halves, low + ((first + n) * columns + k) / 2, 8);
                    const unsigned char *from = high + (first + n) * high_bytes + (bits - 4) * k / 8;
                    if (bits > 4) std::memcpy(&above, from, std::size_t(2 * (bits - 4)));
                }
                for (int64_t i = 0; i < 2; ++i, halves >>= 32) {
                    const std::uint32_t eight = in_bytes(halves) | in_bytes(halves >> 16) << 4;
                    std::memcpy(out + 4 * (i * kBand + n), &eight, 4);
                }
                if (bits == 5) {
                    const auto pairs =
                        std::uint16_t(every_second(above) | every_second(above >> 1) << 8);
                    std::memcpy(out + 8 * kBand + 2 * n, &pairs, 2);
                }
                for (int64_t j = 0; j < 4 && bits == 6; ++j) {
                    std::uint32_t x = above >> 2 * j & 0x03030303;
                    x |= x >> 6;
                    out[8 * kBand + 4 * n + j] = (unsigned char)(x | x >> 12);
                }
            }
}

// Brings the bits above of 16 codes to where the low ones are: in each byte, those of quad i at bit 4.
template <int kHigh> struct HighBits {
    Words bits;
    explicit HighBits(const unsigned char *p) {
        if constexpr (kHigh == 2) bits = *reinterpret_cast<const Words *>(p);
        if constexpr (kHigh == 1) {
            const Words pairs = words(p);
            // Two bytes hold bits of two numbers each; then four hold those of one.
            bits = pairs | pairs << 15;
        }
    }
    template <int kQuad> Words of() const {
        constexpr int shift = 4 - 2 * kQuad;
        constexpr std::uint32_t mask = kHigh == 2 ? 0x30303030u : 0x10101010u;
        if constexpr (shift >= 0)
            return bits << shift & mask;
        else
            return bits >> -shift & mask;
    }
};

// Two quads of the 16 codes at p, the first pair or the second, of kLanes rows of a band.
template <int kBits, bool kTable, int kPair>
inline void unpack_eight(const Blocks &w, const unsigned char *p, int64_t lane, Words &low, Words &high) {
    constexpr int kHigh = kBits - 4;
    const Words both = keep(*reinterpret_cast<const Words *>(p + 4 * (kPair * kBand + lane)));
    low = both & 0x0f0f0f0fu;
    high = both >> 4 & 0x0f0f0f0fu;
    if constexpr (kTable) {
        low = looked_up(w.table, low);
        high = looked_up(w.table, high);
    }
    if constexpr (kHigh > 0) {
        const HighBits<kHigh> bits(p + 8 * kBand + 2 * kHigh * lane);
        low |= bits.template of<2 * kPair>();
        high |= bits.template of<2 * kPair + 1>();
    }
}

// The scales, and minima, of groups of a band; the first group begins a factor, or all have the same one.
inline void widen_numbers(const Blocks &w, int64_t band, int64_t first, int64_t last, float *out) {
    const int64_t each = (w.has_minima ? 2 : 1) * kBand;
    const int64_t begin = (band * w.groups + first) * each, count = (last - first) * each;
    if (!w.factors) {
        for (int64_t i = 0; i < count; i += kLanes)
            store(out + i, load(static_cast<const f16 *>(w.scales) + begin + i));
        return;
    }
    const int64_t of_factor = w.factor_groups() * each;
    const f16 *factors = w.factors + (band * w.factors_each() + first / w.factor_groups()) * each;
    const auto *scales = static_cast<const std::int8_t *>(w.scales) + begin;
    for (int64_t g = 0; g < count; g += of_factor, factors += each)
        for (int64_t i = 0; i < each; i += kLanes) {
            const Floats factor = load(factors + i) * all(w.unit);
            const int64_t end = std::min(g + of_factor, count);
#pragma GCC unroll 4
            for (int64_t at = g + i; at < end; at += each) {
                // Faster by a twelfth with codes of 5 and 6 bits, and slower with those of 4.
                if (i == 0 && w.bits > 4) __builtin_prefetch(scales + at + count, 0, 2);
                store(out + at, load(scales + at) * factor);
            }
        }
}

// R rows of x, from one group to another, added to c.
template <int R, int kBits, bool kTable, bool kMinima>
__attribute__((noinline)) void multiply_blocks_tile(const CodedRows &x, int64_t row, const Blocks &w,
                                                    const float *numbers, int64_t band,
                                                    int64_t first, int64_t last, float *c,
                                                    int64_t c_step) {
    constexpr int V = kGroupedVectors, kHigh = kBits - 4;
    constexpr int64_t chunk_bytes = kBand * 2 * kBits, parts = kMinima ? 2 : 1;
    const int64_t group_bytes = w.group_bytes();
    const unsigned char *codes = w.codes + (band * w.groups + first) * group_bytes;
#if defined(PENSTOCK_SIGNED_BYTES)
    const unsigned flip = kTable ? 0x80808080u : 0;
    const int offset = int(w.offset) - (kTable ? 128 : 0);
#else
    const int offset = int(w.offset);
#endif
    const std::int8_t *from = x.codes(row);
    const float *x_scales = x.scales(row);
    const std::int32_t *sums = x.sums(row);
    const int64_t step = x.step, step4 = x.step / 4;
    for (int64_t n = 0; n < kBand; n += V * kLanes) {
        Floats total[R][V];
        for (int i = 0; i < R; ++i)
            for (int j = 0; j < V; ++j) total[i][j] = load(c + i * c_step + n + j * kLanes);
        const unsigned char *p = codes;
        const bool is_prefetched = n == 0 && (kHigh || prefetches(R, kPrefetchGroupedRows));
        for (int64_t g = first; g < last; ++g) {
            Ints dot[R][V];
#pragma GCC unroll 16
            for (int i = 0; i < R; ++i) {
                const Ints begin = kMinima ? Ints{} : Ints{} - offset * sums[i * step4 + g];
                for (int j = 0; j < V; ++j) dot[i][j] = begin;
            }
            const int64_t begin = g * w.group, end = begin + w.group;
            for (int64_t k = begin; k < end; k += 16, p += chunk_bytes) {
                if (is_prefetched)
                    for (int64_t line = 0; line < chunk_bytes; line += 64)
                        __builtin_prefetch(p + kPrefetchBytes + line, 0, 2);
                const auto unpack = [&]<int kPair>(auto add) {
                    Words low[V], high[V];
                    for (int j = 0; j < V; ++j)
                        unpack_eight<kBits, kTable, kPair>(w, p, n + j * kLanes, low[j], high[j]);
                    add(k + 8 * kPair, low);
                    add(k + 8 * kPair + 4, high);
                };
                const auto add_rows = [&](Ints(&to)[R][V], auto added, int64_t at, const Words(&quads)[V]) {
#pragma GCC unroll 16
                    for (int i = 0; i < R; ++i) {
                        const Words one = keep((Words)every(from + i * step + at));
#pragma GCC unroll 2
                        for (int j = 0; j < V; ++j) to[i][j] = added(to[i][j], quads[j], one);
                    }
                };
#if defined(PENSTOCK_HALF_SUMS)
                Ints sums[R][V] = {}, none[V];  // kGroupedRows need no excess
                const auto add = [&](int64_t at, const Words(&quads)[V]) {
                    if constexpr (kTable)
                        add_signed_quads<true>(dot, none, quads, from + at, step);
                    else
                        add_rows(sums, add_pairs_of_bytes, at, quads);
                };
                const auto flush = [&] {
                    for (int i = 0; i < R; ++i)
                        for (int j = 0; j < V; ++j) dot[i][j] += whole_sums(sums[i][j]), sums[i][j] = Ints{};
                };
                unpack.template operator()<0>(add);
                // Sums of 16 bits hold the products of 16 columns with codes of 5 bits, or of 8 with those of 6.
                if constexpr (kBits == 6) flush();
                unpack.template operator()<1>(add);
                if constexpr (!kTable) flush();
#else
                const auto add = [&](int64_t at, Words(&quads)[V]) {
#if defined(PENSTOCK_SIGNED_BYTES)
                    if constexpr (kTable)
                        for (int j = 0; j < V; ++j) quads[j] = quads[j] ^ flip;
#endif
                    add_rows(dot, add_quads, at, quads);
                };
                unpack.template operator()<0>(add);
                unpack.template operator()<1>(add);
#endif
            }
            const float *of_group_at = numbers + parts * (g - first) * kBand + n;
#pragma GCC unroll 2
            for (int j = 0; j < V; ++j) {
                const Floats scale = load(of_group_at + j * kLanes);
                const Floats minimum =
                    kMinima ? load(of_group_at + kBand + j * kLanes) : Floats{};
#pragma GCC unroll 16
                for (int i = 0; i < R; ++i) {
                    const Floats of_group = __builtin_convertvector(dot[i][j], Floats);
                    const Floats scaled =
                        kMinima ? fused(of_group, scale,
                                        all(-float(sums[i * step4 + g])) * minimum)
                                : of_group * scale;
                    total[i][j] = fused(scaled, all(x_scales[i * step4 + g]), total[i][j]);
                }
            }
        }
        for (int i = 0; i < R; ++i)
            for (int j = 0; j < V; ++j) store(c + i * c_step + n + j * kLanes, total[i][j]);
    }
}

template <int kBits, bool kTable, bool kMinima, int... R>
inline void multiply_blocks_rows(int rows, const CodedRows &x, int64_t row, const Blocks &w,
                                 const float *numbers, int64_t band, int64_t first, int64_t last,
                                 float *c, int64_t c_step, std::integer_sequence<int, R...>) {
    using Tile = void (*)(const CodedRows &, int64_t, const Blocks &, const float *, int64_t,
                          int64_t, int64_t, float *, int64_t);
    static constexpr Tile kTiles[] = {multiply_blocks_tile<R + 1, kBits, kTable, kMinima>...};
    kTiles[rows - 1](x, row, w, numbers, band, first, last, c, c_step);
}

// Calls use<bits, has a table, has minima>() for the formats that there are.
template <class Use> inline void with_kind(const Blocks &w, Use use) {
    if (w.bits == 6)
        use.template operator()<6, false, false>();
    else if (w.bits == 5)
        w.has_minima ? use.template operator()<5, false, true>() : use.template operator()<5, false, false>();
    else
        w.has_minima ? use.template operator()<4, false, true>() : use.template operator()<4, true, false>();
}

// As multiply_grouped.
inline void multiply_blocks(const CodedRows &x, int64_t row, int64_t rows, Blocks w,
                            int64_t band, float *c, int64_t c_step) {
#if defined(PENSTOCK_HALF_SUMS)
    alignas(64) unsigned char levels[kTableBytes];
    if (w.table) w.table = signed_levels(w.table, w.offset, levels), w.offset = 0;
#endif
    for (int64_t i = 0; i < rows; ++i) std::fill_n(c + i * c_step, kBand, 0.0f);
    const int64_t tiles = (rows + kGroupedRows - 1) / kGroupedRows;
    const int64_t block = kBlock / w.group;
    constexpr auto kRows = std::make_integer_sequence<int, kGroupedRows>();
    alignas(64) float numbers[2 * kBlock / 16 * kBand];
    for (int64_t g = 0; g < w.groups; g += block) {
        const int64_t last = std::min(g + block, w.groups);
        widen_numbers(w, band, g, last, numbers);
        for (int64_t tile = 0; tile < tiles; ++tile) {
            const int64_t first = tile * rows / tiles;
            const int count = int((tile + 1) * rows / tiles - first);
            with_kind(w, [&]<int kBits, bool kTable, bool kMinima>() {
                multiply_blocks_rows<kBits, kTable, kMinima>(count, x, row + first, w, numbers, band, g, last,
                                                             c + first * c_step, c_step, kRows);
            });
        }
    }
}
