// A LoRA adapter adds to the output of a linear layer for one token: scale * B (A x), in two steps, as A x
// is needed by all bands of the output. Sums are float32, and so is A x. Each is added up in the same order
// whatever else is computed with it, so a token's result depends on neither its batch nor its chunk.
#pragma once
#include <algorithm>
#include <type_traits>

#include "native/products/products.h"
#include "native/products/vectors.h"

// A is packed so that it is read as one stream: kLowRankRows of its rows at a time, and of each of those so many
// columns in turn. Both are filled up with zeros, and so are the columns of x.
constexpr int64_t kLowRankRows = 4, kLowRankColumns = 16;
// Tokens that read A together.
constexpr int64_t kLowRankTokens = 4;

inline int64_t low_rank_columns(int64_t columns) {
    return (columns + kLowRankColumns - 1) / kLowRankColumns * kLowRankColumns;
}

// out[t][r] = x_t . down_r, for N tokens and one pack of rows of A, `columns` long and apart.
template <int N, class T>
inline void dots(const float *x, const T *down, int64_t columns, Floats (&total)[N][kLowRankRows]) {
    for (int64_t k = 0; k < columns; k += kLowRankColumns, down += kLowRankRows * kLowRankColumns)
        for (int64_t j = 0; j < kLowRankColumns; j += kLanes) {
            Floats w[kLowRankRows];
#pragma GCC unroll 4
            for (int r = 0; r < kLowRankRows; ++r) w[r] = keep(load(down + r * kLowRankColumns + j));
#pragma GCC unroll 4
            for (int t = 0; t < N; ++t) {
                const Floats one = keep(load(x + t * columns + k + j));
#pragma GCC unroll 4
                for (int r = 0; r < kLowRankRows; ++r) total[t][r] = fused(one, w[r], total[t][r]);
            }
        }
}

// The same for some tokens, at most kLowRankTokens, and the rows of A from `from` to `to`; `from` begins a pack.
template <class T>
void shrink_rows(const float *x, int64_t tokens, const T *down, int64_t from, int64_t to,
                 int64_t columns, float *out, int64_t out_step) {
    // So many as there are registers for.
    constexpr int together = kLanes == 16 ? kLowRankTokens : 2;
    const auto with = [&](auto count, int64_t t) {
        constexpr int n = decltype(count)::value;
        for (int64_t r = from; r < to; r += kLowRankRows) {
            Floats total[n][kLowRankRows] = {};
            dots<n>(x + t * columns, down + r * columns, columns, total);
            for (int i = 0; i < n; ++i)
                for (int64_t j = 0; j < std::min(kLowRankRows, to - r); ++j)
                    out[(t + i) * out_step + r + j] = sum(total[i][j]);
        }
    };
    int64_t t = 0;
    for (; t + together <= tokens; t += together) with(std::integral_constant<int, together>{}, t);
    for (; t < tokens; ++t) with(std::integral_constant<int, 1>{}, t);
}

// c[0..32) += scale * (low . up), `up` being a band of B: (rank, 32).
template <class T>
inline void add_low_rank(const float *low, const T *up, int64_t rank, float scale, float *c) {
    constexpr int vectors = kBand / kLanes;
    // The thread's next band, most often. Those of several adapters are too many streams for the processor.
    const char *next = reinterpret_cast<const char *>(up + rank * kBand);
    for (int64_t at = 0; at < int64_t(rank * kBand * sizeof(T)); at += 64) __builtin_prefetch(next + at, 0, 2);
    Floats total[vectors] = {};
    for (int64_t r = 0; r < rank; ++r) {
        const Floats one = all(low[r]);
#pragma GCC unroll 8
        for (int j = 0; j < vectors; ++j)
            total[j] = fused(one, load(up + r * kBand + j * kLanes), total[j]);
    }
    for (int j = 0; j < vectors; ++j)
        store(c + j * kLanes, fused(all(scale), total[j], load(c + j * kLanes)));
}
