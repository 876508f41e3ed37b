// What a LoRA adapter adds to the output of a linear layer for one token: scale * B (A x), in two steps, as A x
// is needed by all bands of the output. Sums are float32, and so is A x. Each is added up in the same order
// whatever else is computed with it, so a token's result depends on neither its batch nor its chunk.
#pragma once
#include <algorithm>

#include "products.h"
#include "vectors.h"

// Rows of A, and of x for it, are filled up with zeros to a multiple of so many.
constexpr int64_t kLowRankColumns = 16;
// Tokens that read A together.
constexpr int64_t kLowRankTokens = 4;

inline int64_t low_rank_columns(int64_t columns) {
    return (columns + kLowRankColumns - 1) / kLowRankColumns * kLowRankColumns;
}

// out[t][r] = x_t . down_r, for N tokens and R rows of A, all of them `columns` long and apart.
template <int N, int R, class T>
inline void dots(const float *x, const T *down, int64_t columns, float *out, int64_t out_step) {
    Floats total[N][R] = {};
    for (int64_t k = 0; k < columns; k += kLanes) {
        Floats w[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) w[r] = keep(load(down + r * columns + k));
#pragma GCC unroll 4
        for (int t = 0; t < N; ++t) {
            const Floats one = keep(load(x + t * columns + k));
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) total[t][r] = fused(one, w[r], total[t][r]);
        }
    }
    for (int t = 0; t < N; ++t)
        for (int r = 0; r < R; ++r) out[t * out_step + r] = sum(total[t][r]);
}

// The same for some tokens, at most kLowRankTokens, and some rows.
template <class T>
void shrink_rows(const float *x, int64_t tokens, const T *down, int64_t rows, int64_t columns,
                 float *out, int64_t out_step) {
    int64_t r = 0;
    if (tokens == kLowRankTokens) {
        for (; r + 2 <= rows; r += 2)
            dots<kLowRankTokens, 2>(x, down + r * columns, columns, out + r, out_step);
        for (; r < rows; ++r)
            dots<kLowRankTokens, 1>(x, down + r * columns, columns, out + r, out_step);
        return;
    }
    for (int64_t t = 0; t < tokens; ++t, x += columns, out += out_step) {
        for (r = 0; r + 4 <= rows; r += 4) dots<1, 4>(x, down + r * columns, columns, out + r, 0);
        for (; r < rows; ++r) dots<1, 1>(x, down + r * columns, columns, out + r, 0);
    }
}

// c[0..32) += scale * (low . up), `up` being a band of B: (rank, 32).
template <class T>
inline void add_low_rank(const float *low, const T *up, int64_t rank, float scale, float *c) {
    constexpr int vectors = kBand / kLanes;
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
