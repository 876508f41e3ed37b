// Products of activations with weights: y = x W^T, for any number of rows of x.
//
// Weights are packed once, into bands of 32 of their rows; inside a band, k runs slowest, and what one
// instruction multiplies lies together: [k / group][32][group]. So a product reads each band as one
// stream, 32 results at a time, and needs no sum over lanes.
//
// Every dot product is added up in the same order, along k, whatever else is in the tile. So a token's
// result depends only on its own sequence: not on the other rows of the batch, and not on how a
// prompt is split into chunks.
#pragma once
#include <algorithm>
#include <string>
#include <vector>

#include "arm.h"
#include "tiles.h"
#include "vectors.h"
#include "ways.h"

constexpr int64_t kBand = 32;
// Rows that products may read and write beyond those they are asked for.
constexpr int64_t kSpare = 32;
// So much of x and of the band is read in one go: it stays in the caches nearest to the arithmetic.
constexpr int64_t kBlock = 1024;
constexpr std::size_t kPrefetchBytes = 8192;
// From so many rows on the arithmetic hides what prefetching instructions cost. For fewer, some
// processors' own prefetching of a stream is faster: see ways.h.
constexpr int kPrefetchRows = 5;

// Where one instruction multiplies pairs of bfloat16, and adds both products.
#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define PENSTOCK_PAIRS 1
#endif

// For weights of T: the type of activations, and how many numbers along k are multiplied together.
template <class T> struct Operands {
    using X = float;
    static constexpr int64_t group = 1;
};
template <> struct Operands<bf16> {
#if defined(PENSTOCK_PAIRS) || defined(PENSTOCK_TILES)
    using X = bf16;
#else
    using X = float;
#endif
    static constexpr int64_t group = 2;
};

inline int64_t banded_rows(int64_t rows) { return (rows + kBand - 1) / kBand * kBand; }

// Packs a matrix of rows; `out` has room for whole bands, and may be `rows` itself.
template <class T> void pack(T *out, const T *rows, int64_t num_rows, int64_t columns) {
    constexpr int64_t group = Operands<T>::group;
    std::vector<T> band(kBand * columns);
    for (int64_t first = 0; first < num_rows; first += kBand) {
        const int64_t count = std::min(kBand, num_rows - first);
        std::fill(band.begin(), band.end(), T{});
        std::copy_n(rows + first * columns, count * columns, band.begin());
        T *to = out + first * columns;
        for (int64_t k = 0; k < columns; k += group)
            for (int64_t n = 0; n < kBand; ++n)
                for (int64_t i = 0; i < group; ++i) *to++ = band[n * columns + k + i];
    }
}

// Where a row begins in its band; from `group` numbers of it to the next are kBand * group.
template <class T> inline const T *row_in_band(const T *packed, int64_t row, int64_t columns) {
    return packed + row / kBand * kBand * columns + row % kBand * Operands<T>::group;
}

// ---- Tiles in vector registers ------------------------------------------------------------------

#if defined(__AVX512F__)
constexpr int kTileRows = 12, kTileVectors = 2;  // of 32 registers
#elif defined(__aarch64__)
constexpr int kTileRows = 6, kTileVectors = 4;  // of 32 registers
#else
// Of 16 registers: one is left for what GCC 12 would else keep in memory.
constexpr int kTileRows = 5, kTileVectors = 2;
#endif

// total[i][j] += x_i * w_j, for the `group` numbers of k at x, and those of kLanes columns at each w.
template <int R, int V>
inline void add_products(Floats (&total)[R][V], const float *x, int64_t x_step,
                         const Floats (&w)[V]) {
#pragma GCC unroll 16
    for (int i = 0; i < R; ++i) {
        const Floats one = keep(all(x[i * x_step]));
#pragma GCC unroll 4
        for (int j = 0; j < V; ++j) total[i][j] = fused(one, w[j], total[i][j]);
    }
}
template <int R, int V, class T>
inline void add_products(Floats (&total)[R][V], const float *x, int64_t x_step,
                         const T *const (&w)[V]) {
    Floats values[V];
    for (int j = 0; j < V; ++j) values[j] = keep(load(w[j]));
    add_products(total, x, x_step, values);
}
// The two numbers of a pair are the halves of a word.
template <int R, int V>
inline void add_products(Floats (&total)[R][V], const float *x, int64_t x_step,
                         const bf16 *const (&w)[V]) {
    Floats even[V], odd[V];
    for (int j = 0; j < V; ++j) {
        const Words pair = *reinterpret_cast<const Words *>(w[j]);
        even[j] = keep((Floats)(pair << 16));
        odd[j] = keep((Floats)(pair & 0xffff0000u));
    }
    add_products(total, x, x_step, even);
    add_products(total, x + 1, x_step, odd);
}
#if defined(PENSTOCK_PAIRS)
inline Floats add_pairs(Floats total, Words a, Words b) {
#if defined(__AVX512BF16__)
    return (Floats)_mm512_dpbf16_ps((__m512)total, (__m512bh)a, (__m512bh)b);
#else
    return (Floats)vbfdotq_f32((float32x4_t)total, (bfloat16x8_t)a, (bfloat16x8_t)b);
#endif
}
template <int R, int V>
inline void add_products(Floats (&total)[R][V], const bf16 *x, int64_t x_step,
                         const bf16 *const (&w)[V]) {
    Words pairs[V];
    for (int j = 0; j < V; ++j) pairs[j] = keep(*reinterpret_cast<const Words *>(w[j]));
#pragma GCC unroll 16
    for (int i = 0; i < R; ++i) {
        std::uint32_t pair;
        std::memcpy(&pair, x + i * x_step, sizeof pair);
        const Words one = keep(Words{} + pair);
#pragma GCC unroll 4
        for (int j = 0; j < V; ++j) total[i][j] = add_pairs(total[i][j], one, pairs[j]);
    }
}
#elif defined(PENSTOCK_TILES)
// Only where tiles are emulated, for tests: one product after the other.
template <int R, int V>
inline void add_products(Floats (&total)[R][V], const bf16 *x, int64_t x_step,
                         const bf16 *const (&w)[V]) {
    float wide[R * 2];
    for (int i = 0; i < R; ++i)
        for (int k = 0; k < 2; ++k) wide[2 * i + k] = widen(x[i * x_step + k]);
    add_products(total, wide, 2, w);
}
#endif

// R rows of x with a band. c is written, or added to where it is not the first part of the sum.
template <class T, class X, int R, bool kFirst>
__attribute__((noinline)) void multiply_tile(const X *x, int64_t x_step, const T *w, int64_t length,
                                             float *c, int64_t c_step) {
    constexpr int64_t group = Operands<T>::group, step = kBand * group;
    for (int64_t n = 0; n < kBand; n += kTileVectors * kLanes) {
        Floats total[R][kTileVectors];
        for (int i = 0; i < R; ++i)
            for (int j = 0; j < kTileVectors; ++j)
                total[i][j] = kFirst ? Floats{} : load(c + i * c_step + n + j * kLanes);
        const T *p = w + n * group;
        const bool is_prefetched = n == 0 && prefetches(R, kPrefetchRows);
        for (int64_t k = 0; k < length; k += group, p += step) {
            if (is_prefetched)
                for (std::size_t line = 0; line < step * sizeof(T); line += 64)
                    __builtin_prefetch(reinterpret_cast<const char *>(p) + kPrefetchBytes + line, 0,
                                       2);
            const T *vectors[kTileVectors];
            for (int j = 0; j < kTileVectors; ++j) vectors[j] = p + j * kLanes * group;
            add_products(total, x + k, x_step, vectors);
        }
        for (int i = 0; i < R; ++i)
            for (int j = 0; j < kTileVectors; ++j)
                store(c + i * c_step + n + j * kLanes, total[i][j]);
    }
}

template <class T, class X, bool kFirst, int... R>
inline void multiply_rows(int rows, const X *x, int64_t x_step, const T *w, int64_t length,
                          float *c, int64_t c_step, std::integer_sequence<int, R...>) {
    using Tile = void (*)(const X *, int64_t, const T *, int64_t, float *, int64_t);
    static constexpr Tile kTiles[] = {multiply_tile<T, X, R + 1, kFirst>...};
    kTiles[rows - 1](x, x_step, w, length, c, c_step);
}

#if defined(PENSTOCK_PAIRED_ROWS)
// As multiply_tile, of P pairs of rows, of which the last may be one row twice; `length` is a multiple of 4.
template <int P>
__attribute__((noinline)) void multiply_paired_tile(const bf16 *x, int64_t x_step, int64_t rows,
                                                    const bf16 *w, int64_t length, bool is_first,
                                                    float *c, int64_t c_step) {
    constexpr int V = kTileVectors;
    const auto second = [rows](int p) { return std::min<int64_t>(2 * p + 1, rows - 1); };
    for (int64_t n = 0; n < kBand; n += V * kLanes) {
        Floats total[P][2 * V];
        for (int p = 0; p < P; ++p)
            for (int j = 0; j < V; ++j) {
                const float *to = c + n + j * kLanes;
                const Floats first = is_first ? Floats{} : load(to + 2 * p * c_step);
                const Floats other = is_first ? Floats{} : load(to + second(p) * c_step);
                total[p][2 * j] = first_halves(first, other);
                total[p][2 * j + 1] = second_halves(first, other);
            }
        const bf16 *at = w + 2 * n;
        for (int64_t k = 0; k < length; k += 4, at += 4 * kBand) {
            if (n == 0)
                for (std::size_t line = 0; line < 8 * kBand; line += 64)
                    __builtin_prefetch(
                        reinterpret_cast<const char *>(at) + kPrefetchBytes + line, 0, 2);
            Words pairs[P];
            for (int p = 0; p < P; ++p)
                pairs[p] = two_rows(x + 2 * p * x_step + k, x + second(p) * x_step + k);
#pragma GCC unroll 4
            for (int j = 0; j < V; ++j) {
                const Words low = *reinterpret_cast<const Words *>(at + 2 * j * kLanes);
                const Words high = *reinterpret_cast<const Words *>(at + 2 * (kBand + j * kLanes));
                const Words left = left_columns(low, high), right = right_columns(low, high);
#pragma GCC unroll 4
                for (int p = 0; p < P; ++p) {
                    total[p][2 * j] = add_square(total[p][2 * j], pairs[p], left);
                    total[p][2 * j + 1] = add_square(total[p][2 * j + 1], pairs[p], right);
                }
            }
        }
        for (int p = 0; p < P; ++p)
            for (int j = 0; j < V; ++j) {
                float *to = c + n + j * kLanes;
                store(to + second(p) * c_step, second_halves(total[p][2 * j], total[p][2 * j + 1]));
                store(to + 2 * p * c_step, first_halves(total[p][2 * j], total[p][2 * j + 1]));
            }
    }
}

// As multiply_rows, of two rows or more. What is left over of a multiple of 4 is multiplied row by row.
inline void multiply_pairs(int rows, const bf16 *x, int64_t x_step, const bf16 *w, int64_t length,
                           bool is_first, float *c, int64_t c_step) {
    constexpr auto kRows = std::make_integer_sequence<int, kTileRows>();
    const int64_t most = length / 4 * 4;
    if (most) {
        static_assert(kTileRows == 6);
        const auto multiply = rows > 4   ? multiply_paired_tile<3>
                              : rows > 2 ? multiply_paired_tile<2>
                                         : multiply_paired_tile<1>;
        multiply(x, x_step, rows, w, most, is_first, c, c_step);
    }
    if (most == length) return;
    x += most, w += most * kBand;
    if (is_first && !most)
        multiply_rows<bf16, bf16, true>(rows, x, x_step, w, length, c, c_step, kRows);
    else
        multiply_rows<bf16, bf16, false>(rows, x, x_step, w, length - most, c, c_step, kRows);
}
#endif

// c[i][0..32) = x_i . w, or += that where `is_first` is not set. Steps count elements between rows.
// With tiles, x, and c, must have room for whole tiles of 16 rows.
template <class T, class X>
inline void multiply_band(const X *x, int64_t x_step, int64_t rows, const T *w, int64_t length,
                          bool is_first, float *c, int64_t c_step) {
#if defined(PENSTOCK_TILES)
    if constexpr (std::is_same_v<T, bf16> && std::is_same_v<X, bf16>)
        if (may_use_tiles())
            return multiply_band_by_tiles(x, x_step, rows, w, length, is_first, c, c_step);
#endif
    const int64_t tiles = (rows + kTileRows - 1) / kTileRows;
    constexpr auto kRows = std::make_integer_sequence<int, kTileRows>();
    for (int64_t k = 0; k < length; k += kBlock) {
        const int64_t part = std::min(kBlock, length - k);
        for (int64_t tile = 0; tile < tiles; ++tile) {
            const int64_t row = tile * rows / tiles, count = (tile + 1) * rows / tiles - row;
            const X *from = x + row * x_step + k;
            float *to = c + row * c_step;
#if defined(PENSTOCK_PAIRED_ROWS)
            if constexpr (std::is_same_v<T, bf16> && std::is_same_v<X, bf16>)
                if (count > 1 && may_pair_rows()) {
                    multiply_pairs(int(count), from, x_step, w + k * kBand, part,
                                   is_first && k == 0, to, c_step);
                    continue;
                }
#endif
            if (is_first && k == 0)
                multiply_rows<T, X, true>(int(count), from, x_step, w + k * kBand, part, to, c_step,
                                          kRows);
            else
                multiply_rows<T, X, false>(int(count), from, x_step, w + k * kBand, part, to,
                                           c_step, kRows);
        }
    }
}

// Names what multiplies vectors, for people to read.
constexpr const char *instructions() {
#if defined(__AVX512F__)
    return "AVX-512";
#elif defined(__FMA__)
    return "AVX2";
#elif defined(__aarch64__)
    return "NEON";
#else
    return "vectors of 4 numbers";
#endif
}

// Names what computes products with weights of T.
template <class T> std::string products() {
#if defined(PENSTOCK_TILES)
    if (std::is_same_v<T, bf16> && may_use_tiles()) return "AMX tiles of bfloat16";
#endif
#if defined(PENSTOCK_PAIRED_ROWS)
    if (std::is_same_v<T, bf16> && may_pair_rows()) return "NEON with matrices of bfloat16";
#endif
#if defined(PENSTOCK_PAIRS)
    if (std::is_same_v<T, bf16>) return instructions() + std::string(" with bfloat16");
#endif
    return instructions();
}
