// Products with weights of 8 or 4 bits: y = x W^T, where W[n, k] = scale[n, g] * (code[n, k] - zero[n, g])
// and g is the group of k.
//
// Activations are rounded to 8 bits too, with a scale for each group of each token (but float32 is not: see
// widened.h), so that a group's products are sums of whole numbers: exact, in any order, on any processor. The
// groups are added up along k in float32. So what products.h says of a token's result holds here as well.
//
// Weights lie in bands of 32 rows as there, with four numbers along k together: [k / 4][32][4] bytes of 8
// bits; of 4 bits, [k / 8][32][4] bytes whose low halves are the first four of eight numbers, and whose high
// halves are the others. Codes are unsigned, since one instruction multiplies unsigned bytes with signed
// ones; `offset` is what they are above the numbers they stand for. Rows end with whole groups.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "products.h"
#include "vectors.h"

typedef std::int32_t Ints __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));

#if defined(__AVX512VNNI__)
// Of 32 registers: a sum of the group for each result; a total that finds none is in the nearest cache. While memory
// brings int8 weights, eight rows are multiplied, if one tile has them all.
constexpr int kGroupedRows = 8;
#elif defined(__AVX512F__) || defined(__aarch64__)
constexpr int kGroupedRows = 6;  // of 32 registers: a sum of the group and a total of each result
#elif defined(__AVX2__)
constexpr int kGroupedRows = 3;  // of 16 registers: a sum of the group for each result
#else
constexpr int kGroupedRows = 2;  // of 16 registers
#endif
constexpr int kGroupedVectors = 2;
constexpr int kPrefetchGroupedRows = 4;  // as kPrefetchRows

// ---- Sums of four products of bytes ---------------------------------------------------------------------

// Where an instruction adds pairs of products of bytes in 16 bits alone.
#if (defined(__AVX512BW__) && !defined(__AVX512VNNI__)) || \
    (defined(__AVX2__) && !defined(__AVX512F__) && !defined(__AVXVNNI__))
#define PENSTOCK_HALF_SUMS 1
constexpr int kMostRows = 8;  // of a tile of multiply_grouped, whose totals are in the nearest cache
#else
constexpr int kMostRows = kGroupedRows;
#endif

#if defined(__ARM_FEATURE_DOTPROD) || defined(PENSTOCK_PAIRED_BYTES)
#define PENSTOCK_SIGNED_BYTES 1  // it multiplies signed bytes with signed ones
#endif

// The four bytes at p, in every lane.
inline Ints every(const void *p) {
    std::int32_t one;
    std::memcpy(&one, p, sizeof one);
    return one - Ints{};
}

// total + the products of the unsigned bytes of w with the signed ones of x, four in each lane.
inline Ints add_quads(Ints total, Words w, Words x) {
#if defined(__AVX512VNNI__)
    return (Ints)_mm512_dpbusd_epi32((__m512i)total, (__m512i)w, (__m512i)x);
#elif defined(__AVXVNNI__) && !defined(__AVX512F__)
    return (Ints)_mm256_dpbusd_avx_epi32((__m256i)total, (__m256i)w, (__m256i)x);
#elif defined(PENSTOCK_SIGNED_BYTES)
    return (Ints)vdotq_s32((int32x4_t)total, (int8x16_t)w, (int8x16_t)x);
#else
    for (int i = 0; i < 4; ++i)
        total += (Ints)(w >> 8 * i & 0xff) * ((Ints)(x << (24 - 8 * i)) >> 24);
    return total;
#endif
}

#if defined(PENSTOCK_HALF_SUMS)
// So many columns' products with codes of at most 15 fit in sums of 16 bits: 16 of them, of at most 15 * 127.
constexpr int64_t kHalfSumColumns = 32;
// So many rows of x get signs by an instruction. AVX2's takes a pipe that multiplies, which with more rows is dearer
// than what inverted bits need.
#if defined(__AVX512BW__)
constexpr int kSignedRows = kMostRows;
#else
constexpr int kSignedRows = 3;
#endif
static_assert(kGroupedRows <= kSignedRows);  // as blocks.h takes for granted

// In each half of a lane, its sum of 16 bits and the products of two unsigned bytes of w with signed ones of x.
inline Ints add_pairs_of_bytes(Ints sums, Words w, Words x) {
#if defined(__AVX512BW__)
    return (Ints)_mm512_add_epi16((__m512i)sums, _mm512_maddubs_epi16((__m512i)w, (__m512i)x));
#else
    return (Ints)_mm256_add_epi16((__m256i)sums, _mm256_maddubs_epi16((__m256i)w, (__m256i)x));
#endif
}
// In each lane, the sum of its two sums of 16 bits.
inline Ints whole_sums(Ints sums) {
    const Words ones = Words{} + 0x00010001u;
#if defined(__AVX512BW__)
    return (Ints)_mm512_madd_epi16((__m512i)ones, (__m512i)sums);
#else
    return (Ints)_mm256_madd_epi16((__m256i)ones, (__m256i)sums);
#endif
}
// Bytes of w without their signs, which are at most 128, and bytes of x with the signs of w's beside their own.
inline Words sizes_of(Words w) {
#if defined(__AVX512BW__)
    return (Words)_mm512_abs_epi8((__m512i)w);
#else
    return (Words)_mm256_abs_epi8((__m256i)w);
#endif
}
inline Words signed_as(Words w, Words x) {
#if defined(__AVX512BW__)
    return (Words)_mm512_mask_sub_epi8((__m512i)x, _mm512_movepi8_mask((__m512i)w), __m512i{}, (__m512i)x);
#else
    return (Words)_mm256_sign_epi8((__m256i)x, (__m256i)w);
#endif
}

// Adds to R rows' sums the products of signed bytes of w, four in each lane, with four of each row. Unsigned sizes of w
// are multiplied with x that has the signs of w's: two such products fit in 16 bits, as x is at most 127, or 128 where
// bits are inverted. That makes -x - 1 of x, and `excess`, in halves of 16 bits, is what each row's sum then has too
// much. kKeeps: GCC 12 would move sums to memory and back.
template <bool kKeeps, int R, int V>
inline void add_signed_quads(Ints (&dot)[R][V], Ints (&excess)[V], const Words (&w)[V], const std::int8_t *x,
                             int64_t step) {
    typedef std::int8_t SignedBytes __attribute__((vector_size(4 * kLanes)));
    constexpr bool kInverts = R > kSignedRows;
    Words sizes[V], signs[V];
    for (int j = 0; j < V; ++j) {
        sizes[j] = keep(sizes_of(w[j]));
        signs[j] = kInverts ? keep((Words)((SignedBytes)w[j] < 0)) : w[j];
        if constexpr (kInverts) excess[j] = add_pairs_of_bytes(excess[j], sizes[j], signs[j]);
        if constexpr (kInverts && kKeeps) excess[j] = keep(excess[j]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < R; ++i) {
        const Words one = (Words)every(x + i * step);
#pragma GCC unroll 4
        for (int j = 0; j < V; ++j) {
            const Words with_signs = kInverts ? one ^ signs[j] : signed_as(signs[j], one);
            dot[i][j] += whole_sums(add_pairs_of_bytes(Ints{}, sizes[j], with_signs));
            if constexpr (kKeeps) dot[i][j] = keep(dot[i][j]);
        }
    }
}
#endif

// Names what computes that, for people to read.
inline std::string code_instructions() {
#if defined(__AVX512VNNI__) || (defined(__AVXVNNI__) && !defined(__AVX512F__))
    return instructions() + std::string(" with VNNI");
#elif defined(PENSTOCK_PAIRED_BYTES)
    return instructions() + std::string(" with matrices of bytes");
#elif defined(PENSTOCK_SIGNED_BYTES)
    return instructions() + std::string(" with dot products of bytes");
#else
    return instructions();
#endif
}

// Each byte of `codes`, 0 to 15, replaced by that byte of the table, of which there are copies for
// every 16 bytes of a vector.
inline Words looked_up(const unsigned char *table, Words codes) {
#if defined(__AVX512BW__)
    return (Words)_mm512_shuffle_epi8(_mm512_loadu_si512(table), (__m512i)codes);
#elif defined(__AVX2__) && !defined(__AVX512F__)
    return (Words)_mm256_shuffle_epi8(
        _mm256_loadu_si256(reinterpret_cast<const __m256i *>(table)), (__m256i)codes);
#elif defined(__aarch64__)
    return (Words)vqtbl1q_u8(vld1q_u8(table), (uint8x16_t)codes);
#else
    unsigned char bytes[sizeof(Words)];
    std::memcpy(bytes, &codes, sizeof codes);
    for (unsigned char &byte : bytes) byte = table[byte];
    std::memcpy(&codes, bytes, sizeof codes);
    return codes;
#endif
}
constexpr int64_t kTableBytes = 64;

#if defined(PENSTOCK_HALF_SUMS)
// The bytes of a table, less `offset`, at `out`, which it returns.
inline const unsigned char *signed_levels(const unsigned char *table, int64_t offset, unsigned char *out) {
    for (int64_t i = 0; i < kTableBytes; ++i) out[i] = (unsigned char)(table[i] - offset);
    return out;
}
#endif

// [k / 8][32][4] of two numbers each, as [k / 4][32][4].
inline void widen_nibbles(const unsigned char *codes, int64_t numbers, const unsigned char *table,
                          unsigned char *out) {
    constexpr int64_t kRow = 4 * kBand;
    for (int64_t k = 0; k < numbers; k += 8, out += kRow)
        for (int64_t end = kRow; end; end -= sizeof(Words), codes += sizeof(Words), out += sizeof(Words)) {
            __builtin_prefetch(codes + kPrefetchBytes, 0, 2);
            const Words both = *reinterpret_cast<const Words *>(codes);
            Words low = both & 0x0f0f0f0fu, high = both >> 4 & 0x0f0f0f0fu;
            if (table) low = looked_up(table, low), high = looked_up(table, high);
            *reinterpret_cast<Words *>(out) = low;
            *reinterpret_cast<Words *>(out + kRow) = high;
        }
}

// ---- Activations ----------------------------------------------------------------------------------------

// Where rows of activations of 8 bits are; of each row the codes, then the scales, then the sums of codes.
struct CodedRows {
    const unsigned char *memory;
    int64_t step, columns, groups;  // bytes from row to row; codes of a row, with those that fill it up

    static int64_t bytes(int64_t columns, int64_t group) {
        const int64_t groups = (columns + group - 1) / group;
        // Not a multiple of 4 KiB, as rows so far apart would share few cache lines.
        return (groups * (group + 8) + 63) / 64 * 64 + 64;
    }
    static CodedRows at(const unsigned char *memory, int64_t columns, int64_t group) {
        const int64_t groups = (columns + group - 1) / group;
        return {memory, bytes(columns, group), groups * group, groups};
    }
    const std::int8_t *codes(int64_t row) const {
        return reinterpret_cast<const std::int8_t *>(memory + row * step);
    }
    const float *scales(int64_t row) const {
        return reinterpret_cast<const float *>(memory + row * step + columns);
    }
    const std::int32_t *sums(int64_t row) const {
        return reinterpret_cast<const std::int32_t *>(memory + row * step + columns + 4 * groups);
    }
};

// Without their signs, numbers are in the order of their bits, and after them what is none.
inline Ints larger_size(Ints sizes, Floats x) {
    const Ints size = (Ints)x & 0x7fffffff;
    return sizes > size ? sizes : size;
}
inline float peak_of(Ints sizes, std::int32_t most) {
#if defined(__AVX512F__)
    most = std::max(most, _mm512_reduce_max_epi32((__m512i)sizes));
#else
    for (int lane = 0; lane < kLanes; ++lane) most = std::max(most, sizes[lane]);
#endif
    return std::bit_cast<float>(most);
}
// To nearest. Adding 1.5 * 2^23 rounds to a whole number, which is then in the low bits.
inline Ints whole_numbers(Floats x) { return (Ints)(x + 12582912.0f) - 0x4b400000; }

typedef std::int8_t Bytes __attribute__((vector_size(kLanes), aligned(1), may_alias));

// Narrows numbers that fit. In steps: GCC 12 would convert one after the other.
inline Bytes narrowed(Ints whole) {
#if defined(__AVX512F__)
    return (Bytes)_mm512_cvtepi32_epi8((__m512i)whole);
#else
    typedef std::int16_t Shorts __attribute__((vector_size(2 * kLanes)));
    return __builtin_convertvector(__builtin_convertvector(whole, Shorts), Bytes);
#endif
}
inline std::int32_t sum(Ints numbers) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_epi32((__m512i)numbers);
#else
    std::int32_t total = 0;
    for (int lane = 0; lane < kLanes; ++lane) total += numbers[lane];
    return total;
#endif
}

// Numbers as codes of 8 bits, and the scale of all.
inline float coded(const float *x, int64_t count, std::int8_t *codes, std::int32_t *sum_of_codes) {
    Ints sizes = {};
    std::int32_t most = 0;
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) sizes = larger_size(sizes, load(x + i));
    for (; i < count; ++i) most = std::max(most, std::bit_cast<std::int32_t>(std::fabs(x[i])));
    const float peak = peak_of(sizes, most);
    const float inverse = peak > 0 ? 127.0f / peak : 0.0f;
    Ints total = {};
    std::int32_t of_rest = 0;
    for (i = 0; i + kLanes <= count; i += kLanes) {
        const Ints whole = whole_numbers(load(x + i) * inverse);
        total += whole;
        *reinterpret_cast<Bytes *>(codes + i) = narrowed(whole);
    }
    for (; i < count; ++i) {
        const std::int32_t whole = whole_numbers(all(x[i] * inverse))[0];
        of_rest += whole;
        codes[i] = std::int8_t(whole);
    }
    *sum_of_codes = sum(total) + of_rest;
    // An infinity, or what is not a number, reaches the result as such.
    return peak < INFINITY ? peak / 127.0f : NAN;
}

// One row, to the memory of a row of CodedRows.
__attribute__((noinline)) inline void code_row(const float *x, int64_t columns, int64_t group, unsigned char *memory) {
    const int64_t groups = (columns + group - 1) / group;
    auto *codes = reinterpret_cast<std::int8_t *>(memory);
    auto *scales = reinterpret_cast<float *>(memory + groups * group);
    auto *sums = reinterpret_cast<std::int32_t *>(scales + groups);
    for (int64_t g = 0; g < groups; ++g, x += group, codes += group, columns -= group) {
        const int64_t count = std::min(group, columns);
        scales[g] = coded(x, count, codes, sums + g);
        std::fill(codes + count, codes + group, std::int8_t(0));
    }
}

// ---- Weights --------------------------------------------------------------------------------------------

// A matrix in bands, with its scales and zeros [groups][32] for each band.
struct Grouped {
    const unsigned char *codes;
    const void *scales;          // of f16 or float
    const unsigned char *zeros;  // or null
    const unsigned char *table;  // what codes of 4 bits are replaced by, kTableBytes, or null
    int64_t bits, group, groups, offset;
    bool has_half_scales;

    int64_t group_bytes() const { return kBand * group * bits / 8; }
    // Reads those of kLanes rows, by where they are in `scales` and `zeros`.
    Floats scales_at(int64_t lane) const {
        return has_half_scales ? load(static_cast<const f16 *>(scales) + lane)
                               : load(static_cast<const float *>(scales) + lane);
    }
    Floats zeros_at(int64_t lane) const {
        const Floats zero = load(zeros + lane);
#if defined(PENSTOCK_SIGNED_BYTES)
        if (bits == 8) return zero - 128.0f;
#endif
        return zero;
    }
};

// Packs codes; `out` has room for whole bands of whole groups, and may be `codes` where these fill them. Of 8
// bits they are signed, and of 4 bits two to a byte, the first in its low half.
inline void pack_codes(unsigned char *out, const unsigned char *codes, int64_t rows, int64_t columns,
                       int64_t bits, int64_t group) {
    const int64_t padded = (columns + group - 1) / group * group * bits / 8;
    const int64_t row_bytes = (columns * bits + 7) / 8;
    std::vector<unsigned char> band(kBand * padded);
    for (int64_t first = 0; first < rows; first += kBand) {
        std::fill(band.begin(), band.end(), 0);
        for (int64_t n = 0; n < std::min(kBand, rows - first); ++n)
            std::copy_n(codes + (first + n) * row_bytes, row_bytes, &band[n * padded]);
        for (int64_t k = 0; k < padded; k += 4)
            for (int64_t n = 0; n < kBand; ++n, out += 4) {
                const unsigned char *from = &band[n * padded + k];
                if (bits == 8) {
                    for (int i = 0; i < 4; ++i) out[i] = from[i] ^ 128;
                    continue;
                }
                for (int i = 0; i < 2; ++i) {
                    out[2 * i] = (unsigned char)((from[i] & 15) | (from[i + 2] & 15) << 4);
                    out[2 * i + 1] = (unsigned char)(from[i] >> 4 | (from[i + 2] & 0xf0));
                }
            }
    }
}

// ---- Products -------------------------------------------------------------------------------------------

enum Kind { kBytes, kNibbles, kLookedUp };

// A result, once a group's products are added to it; without zeros these contain what the offset takes away.
template <bool kZeros>
inline Floats with_group(Floats total, Floats of_group, float sum, Floats zero, Floats scale,
                         float x_scale) {
    if constexpr (kZeros) of_group = fused(all(-sum), zero, of_group);
    return fused(of_group * scale, all(x_scale), total);
}

#if defined(PENSTOCK_PAIRED_BYTES)
// Adds a group's products to R rows' sums, two rows with two columns at a time; of codes that `flip` makes signed.
template <int R, Kind kKind>
inline void add_up_pairs(Ints (&dot)[R][kGroupedVectors], const std::int8_t *x, int64_t step,
                         const unsigned char *p, const Grouped &w, unsigned flip,
                         bool prefetches) {
    constexpr int P = (R + 1) / 2, V = kGroupedVectors;
    constexpr int64_t kRow = 4 * kBand, kBytesEach = kKind == kBytes ? 2 * kRow : kRow;
    Ints squares[P][2 * V] = {};
    for (int64_t k = 0; k < w.group; k += 8, p += kBytesEach) {
        if (prefetches)
            for (int64_t line = 0; line < kBytesEach; line += 64)
                __builtin_prefetch(p + kPrefetchBytes + line, 0, 2);
        Words pairs[P];
        for (int i = 0; i < P; ++i)  // the last row twice, if it is alone
            pairs[i] = two_rows(x + 2 * i * step + k, x + std::min(2 * i + 1, R - 1) * step + k);
        for (int j = 0; j < V; ++j) {
            Words low = reinterpret_cast<const Words *>(p)[j], high;
            if constexpr (kKind == kBytes) {
                high = reinterpret_cast<const Words *>(p + kRow)[j];
            } else {
                high = low >> 4 & 0x0f0f0f0fu;
                low = low & 0x0f0f0f0fu;
                if constexpr (kKind == kLookedUp)
                    low = looked_up(w.table, low), high = looked_up(w.table, high);
            }
            const Words left = left_columns(low ^ flip, high ^ flip);
            const Words right = right_columns(low ^ flip, high ^ flip);
            const auto add = [](Ints &square, Words rows, Words columns) {
                square = (Ints)vmmlaq_s32((int32x4_t)square, (int8x16_t)rows, (int8x16_t)columns);
            };
            for (int i = 0; i < P; ++i) {
                add(squares[i][2 * j], pairs[i], left);
                add(squares[i][2 * j + 1], pairs[i], right);
            }
        }
    }
    for (int i = 0; i < R; ++i)
        for (int j = 0; j < V; ++j) {
            const Ints left = squares[i / 2][2 * j], right = squares[i / 2][2 * j + 1];
            dot[i][j] += i % 2 ? second_halves(left, right) : first_halves(left, right);
        }
}
#endif

#if defined(PENSTOCK_HALF_SUMS)
// Adds a group's products with codes of at most 15 to R rows' sums.
template <int R, int V>
inline void add_up_nibbles(Ints (&dot)[R][V], const std::int8_t *x, int64_t step, const unsigned char *p,
                           int64_t group) {
    for (int64_t k = 0; k < group;) {
        Ints sums[R][V] = {};
        for (const int64_t end = std::min(group, k + kHalfSumColumns); k < end; k += 8, p += 4 * kBand) {
            Words low[V], high[V];
            for (int j = 0; j < V; ++j) {
                const Words both = keep(reinterpret_cast<const Words *>(p)[j]);
                low[j] = keep(both & 0x0f0f0f0fu), high[j] = keep(both >> 4 & 0x0f0f0f0fu);
            }
#pragma GCC unroll 16
            for (int i = 0; i < R; ++i) {
                const Words first = (Words)every(x + i * step + k), second = (Words)every(x + i * step + k + 4);
#pragma GCC unroll 4
                for (int j = 0; j < V; ++j) {
                    sums[i][j] = add_pairs_of_bytes(sums[i][j], low[j], first);
                    sums[i][j] = keep(add_pairs_of_bytes(sums[i][j], high[j], second));
                }
            }
        }
#pragma GCC unroll 16
        for (int i = 0; i < R; ++i)
#pragma GCC unroll 4
            for (int j = 0; j < V; ++j) dot[i][j] += whole_sums(sums[i][j]);
    }
}

// Adds a group's products with codes of 8 bits, or with the numbers that a table of signed ones has for those of 4.
template <Kind kKind, int R, int V>
inline void add_up_bytes(Ints (&dot)[R][V], Ints (&excess)[V], const std::int8_t *x, int64_t step,
                         const unsigned char *p, int64_t group, const unsigned char *table) {
    constexpr int64_t kColumns = kKind == kBytes ? 4 : 8;
    for (const std::int8_t *end = x + group; x < end; x += kColumns, p += 4 * kBand) {
        Words codes[V], w[V];
        for (int j = 0; j < V; ++j) codes[j] = keep(reinterpret_cast<const Words *>(p)[j]);
        for (int j = 0; j < V; ++j)
            w[j] = kKind == kBytes ? codes[j] ^ 0x80808080u : looked_up(table, codes[j] & 0x0f0f0f0fu);
        add_signed_quads<kKind != kBytes>(dot, excess, w, x, step);
        if constexpr (kKind == kBytes) continue;
        for (int j = 0; j < V; ++j) w[j] = looked_up(table, codes[j] >> 4 & 0x0f0f0f0fu);
        add_signed_quads<kKind != kBytes>(dot, excess, w, x + 4, step);
    }
}

// R rows of x, from one group to another, added to c. All 32 results take a group before the next: so memory brings
// weights all the time. The totals are in the nearest cache.
template <int R, Kind kKind, bool kZeros>
__attribute__((noinline)) void multiply_grouped_tile(const CodedRows &x, int64_t row, const Grouped &w,
                                                     const unsigned char *codes, int64_t band, int64_t first,
                                                     int64_t last, float *c, int64_t c_step) {
    constexpr int V = std::min<int>(kBand / kLanes, R > 4 ? 1 : R > 2 ? 2 : 4);
    const int64_t group_bytes = kBand * w.group * (kKind == kBytes ? 8 : 4) / 8, step4 = x.step / 4;
    // Bytes that have been looked up are in a cache.
    const bool is_prefetched = prefetches(R, kPrefetchGroupedRows) && !(kKind == kBytes && w.table);
    // Whole numbers are added to the bits of 1.5 * 2^23, and so to the number.
    constexpr float kShift = 12582912, lowest = kKind == kBytes ? 128 : 0;
    constexpr auto kShiftBits = std::bit_cast<std::int32_t>(kShift);
    const std::int8_t *from = x.codes(row) + first * w.group;
    float total[R][kBand];
    for (int i = 0; i < R; ++i) std::copy_n(c + i * c_step, kBand, total[i]);
    for (int64_t g = first; g < last; ++g, from += w.group, codes += group_bytes) {
        if (is_prefetched)
            for (int64_t line = 0; line < group_bytes; line += 64)
                __builtin_prefetch(codes + kPrefetchBytes + line, 0, 2);
        float x_scale[R], sum[R], begin[R];
        for (int i = 0; i < R; ++i) {
            x_scale[i] = x.scales(row)[i * step4 + g];
            sum[i] = float(x.sums(row)[i * step4 + g]);
            begin[i] = kShift + (kZeros ? 0.0f : float(w.offset) * sum[i]);
        }
        for (int64_t n = 0; n < kBand; n += V * kLanes) {
            Ints dot[R][V], excess[V] = {};
#pragma GCC unroll 16
            for (int i = 0; i < R; ++i)
#pragma GCC unroll 4
                for (int j = 0; j < V; ++j) dot[i][j] = Ints{} + kShiftBits;
            if constexpr (kKind == kNibbles)
                add_up_nibbles(dot, from, x.step, codes + 4 * n, w.group);
            else
                add_up_bytes<kKind>(dot, excess, from, x.step, codes + 4 * n, w.group, w.table);
            const int64_t at = (band * w.groups + g) * kBand + n;
#pragma GCC unroll 4
            for (int j = 0; j < V; ++j) {
                const Floats too_much = (Floats)(whole_sums(excess[j]) + kShiftBits);
                const Floats scale = w.scales_at(at + j * kLanes);
                const Floats zero = kZeros ? w.zeros_at(at + j * kLanes) - all(lowest) : Floats{};
#pragma GCC unroll 16
                for (int i = 0; i < R; ++i) {
                    const Floats of_group = (Floats)dot[i][j] - (kKind == kNibbles ? all(begin[i]) : too_much);
                    float *to = total[i] + n + j * kLanes;
                    store(to, with_group<kZeros>(load(to), of_group, sum[i], zero, scale, x_scale[i]));
                }
            }
        }
    }
    for (int i = 0; i < R; ++i) std::copy_n(total[i], kBand, c + i * c_step);
}
#else
// R rows of x, from one group to another, added to c.
template <int R, Kind kKind, bool kZeros>
__attribute__((noinline)) void multiply_grouped_tile(const CodedRows &x, int64_t row,
                                                     const Grouped &w, const unsigned char *codes,
                                                     int64_t band, int64_t first, int64_t last,
                                                     float *c, int64_t c_step) {
    constexpr int V = kGroupedVectors;
    const int64_t group_bytes = w.group_bytes();
#if defined(PENSTOCK_SIGNED_BYTES)
    const int offset = int(w.offset) - (kKind == kNibbles ? 0 : 128);
    const unsigned flip = kKind == kNibbles ? 0 : 0x80808080u;
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
        for (int64_t g = first; g < last; ++g) {
            const unsigned char *p = codes + (g - first) * group_bytes + 4 * n;
            Ints dot[R][V];
#pragma GCC unroll 16
            for (int i = 0; i < R; ++i) {
                const Ints begin = kZeros ? Ints{} : every(sums + i * step4 + g) * -offset;
                for (int j = 0; j < V; ++j) dot[i][j] = begin;
            }
            auto add = [&](int64_t k, Words (&quads)[V]) {
#if defined(PENSTOCK_SIGNED_BYTES)
                for (int j = 0; j < V; ++j) quads[j] = quads[j] ^ flip;
#endif
#pragma GCC unroll 16
                for (int i = 0; i < R; ++i) {
                    const Words one = keep((Words)every(from + i * step + k));
#pragma GCC unroll 2
                    for (int j = 0; j < V; ++j) dot[i][j] = add_quads(dot[i][j], quads[j], one);
                }
            };
            const int64_t begin = g * w.group;
            const bool is_prefetched = n == 0 && prefetches(R, kPrefetchGroupedRows);
#if defined(PENSTOCK_PAIRED_BYTES)
            constexpr bool kIsPaired = R > 1;
            if constexpr (kIsPaired)
                add_up_pairs<R, kKind>(dot, from + begin, step, p, w, flip, is_prefetched);
#else
            constexpr bool kIsPaired = false;
#endif
            const int64_t end = kIsPaired ? begin : begin + w.group;
            for (int64_t k = begin; k < end; k += kKind == kBytes ? 4 : 8, p += 4 * kBand) {
                Words low[V], high[V];
                if (is_prefetched)
                    for (std::size_t line = 0; line < 4 * kBand; line += 64)
                        __builtin_prefetch(p + kPrefetchBytes + line, 0, 2);
                for (int j = 0; j < V; ++j) {
                    low[j] = keep(reinterpret_cast<const Words *>(p)[j]);
                    if constexpr (kKind == kBytes) continue;
                    high[j] = low[j] >> 4 & 0x0f0f0f0fu;
                    low[j] = low[j] & 0x0f0f0f0fu;
                    if constexpr (kKind == kLookedUp) {
                        high[j] = looked_up(w.table, high[j]);
                        low[j] = looked_up(w.table, low[j]);
                    }
                }
                add(k, low);
                if constexpr (kKind != kBytes) add(k + 4, high);
            }
            const int64_t at = (band * w.groups + g) * kBand + n;
#pragma GCC unroll 2
            for (int j = 0; j < V; ++j) {
                const Floats scale = w.scales_at(at + j * kLanes);
                const Floats zero = kZeros ? w.zeros_at(at + j * kLanes) : Floats{};
#pragma GCC unroll 16
                for (int i = 0; i < R; ++i)
                    total[i][j] =
                        with_group<kZeros>(total[i][j], __builtin_convertvector(dot[i][j], Floats),
                                           float(sums[i * step4 + g]), zero, scale, x_scales[i * step4 + g]);
            }
        }
        for (int i = 0; i < R; ++i)
            for (int j = 0; j < V; ++j) store(c + i * c_step + n + j * kLanes, total[i][j]);
    }
}
#endif

template <Kind kKind, bool kZeros, int... R>
inline void multiply_grouped_rows(int rows, const CodedRows &x, int64_t row, const Grouped &w,
                                  const unsigned char *codes, int64_t band, int64_t first, int64_t last, float *c,
                                  int64_t c_step, std::integer_sequence<int, R...>) {
    using Tile = void (*)(const CodedRows &, int64_t, const Grouped &, const unsigned char *, int64_t, int64_t,
                          int64_t, float *, int64_t);
    static constexpr Tile kTiles[] = {multiply_grouped_tile<R + 1, kKind, kZeros>...};
    kTiles[rows - 1](x, row, w, codes, band, first, last, c, c_step);
}

// c[i][0..32) = x_i . w, for `rows` rows of x from `row` on, and a band of w, by vectors. grouped_tiles.h has the
// same by the best that there is.
inline void multiply_grouped(const CodedRows &x, int64_t row, int64_t rows, Grouped w, int64_t band, float *c,
                             int64_t c_step) {
    for (int64_t i = 0; i < rows; ++i) std::fill_n(c + i * c_step, kBand, 0.0f);
    const int64_t tiles = (rows + kMostRows - 1) / kMostRows;
    const int64_t block = std::max<int64_t>(1, kBlock / w.group);
    constexpr auto kRows = std::make_integer_sequence<int, kMostRows>();
    bool has_bytes = w.bits == 8;
#if defined(PENSTOCK_HALF_SUMS)
    // Numbers are looked up once for all tiles, if there are several: codes of 8 bits are 128 above them.
    alignas(64) unsigned char levels[kTableBytes], bytes[kBlock * kBand];
    if (w.table) {
        has_bytes = tiles > 1;
        w.table = signed_levels(w.table, w.offset - (has_bytes ? 128 : 0), levels);
    }
#endif
    for (int64_t g = 0; g < w.groups; g += block) {
        const int64_t last = std::min(g + block, w.groups);
        const unsigned char *codes = w.codes + (band * w.groups + g) * w.group_bytes();
#if defined(PENSTOCK_HALF_SUMS)
        if (w.table && has_bytes) {
            widen_nibbles(codes, (last - g) * w.group, w.table, bytes);
            codes = bytes;
        }
#endif
        for (int64_t tile = 0; tile < tiles; ++tile) {
            const int64_t first = tile * rows / tiles;
            const int count = int((tile + 1) * rows / tiles - first);
            auto multiply = [&]<Kind kKind, bool kZeros>() {
                multiply_grouped_rows<kKind, kZeros>(count, x, row + first, w, codes, band, g, last,
                                                     c + first * c_step, c_step, kRows);
            };
            if (has_bytes)
                w.zeros ? multiply.operator()<kBytes, true>()
                        : multiply.operator()<kBytes, false>();
            else if (w.table)
                multiply.operator()<kLookedUp, false>();
            else
                w.zeros ? multiply.operator()<kNibbles, true>()
                        : multiply.operator()<kNibbles, false>();
        }
    }
}
