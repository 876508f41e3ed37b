// Attention of one tile of queries to one KV head over the block table, by the online softmax of Milakov
// and Gimelshein 2018 (arXiv:1805.02867).
//
// Keys and values lie in the pool as products multiply with them (see KVLayout), and are taken 64
// positions at a time by all queries of the tile, those of one group of heads among them. A sequence's
// positions are cut into the same pieces whoever computes them, and the pieces are merged in order: so a
// long context can be spread over threads, and a token has the same result as a decode and in a prompt.
#pragma once
#include <algorithm>
#include <limits>
#include <memory>
#include <type_traits>

#include "products.h"

constexpr int64_t kKeys = 64;    // positions that are taken together
constexpr int64_t kPiece = 512;  // positions of a piece
constexpr int64_t kRun = 16;     // positions that are packed together: the lanes of the widest vectors
constexpr int64_t kRuns = kKeys / kRun;

// Rows that products may read and write beyond those they are asked for.
constexpr int64_t kSpare = 32;

// Where the keys and values of a position are in a pool of T.
//
// A run of 16 positions and a head are packed together: keys as [head_dim / group][16][group], so that
// lanes are positions, and values as [16 / group][head_dim][group], so that lanes are the head's numbers.
// Where blocks are not whole runs, they lie row by row, and are packed whenever they are read.
template <class T> struct KVLayout {
    static constexpr int64_t group = Operands<T>::group;
    int64_t block_size, kv_heads, head_dim;

    bool is_packed() const { return block_size % kRun == 0; }
    // Of a run, or of a row.
    int64_t start(int64_t slot, int64_t head) const {
        if (is_packed()) return (slot / kRun * kv_heads + head) * kRun * head_dim;
        return (slot * kv_heads + head) * head_dim;
    }
    static void put_key(T *run, const T *key, int64_t at, int64_t head_dim) {
        for (int64_t k = 0; k < head_dim; ++k)
            run[k / group * kRun * group + at * group + k % group] = key[k];
    }
    static void put_value(T *run, const T *value, int64_t at, int64_t head_dim) {
        T *to = run + at / group * group * head_dim + at % group;
        for (int64_t n = 0; n < head_dim; ++n) to[n * group] = value[n];
    }
    void put(T *keys, T *values, int64_t slot, int64_t head, const T *key, const T *value) const {
        const int64_t from = start(slot, head);
        if (is_packed()) {
            put_key(keys + from, key, slot % kRun, head_dim);
            put_value(values + from, value, slot % kRun, head_dim);
        } else {
            std::copy_n(key, head_dim, keys + from);
            std::copy_n(value, head_dim, values + from);
        }
    }
};

// What rows of queries have gathered over some positions.
struct Gathered {
    float *mixed;   // (rows, step): the weighted sum of values
    float *peak;    // (rows): the highest score, -infinity if there was none
    float *weight;  // (rows): the sum of the weights, of which the highest is 1

    static int64_t floats(int64_t rows, int64_t step) { return rows * (step + 2); }
    static Gathered at(float *memory, int64_t rows, int64_t step) {
        return {memory, memory + rows * step, memory + rows * (step + 1)};
    }
    void clear(int64_t rows, int64_t step) const {
        std::fill(mixed, mixed + rows * step, 0.0f);
        std::fill(peak, peak + rows, -std::numeric_limits<float>::infinity());
        std::fill(weight, weight + rows, 0.0f);
    }
};

// Adds what the next piece has gathered to what those before it have.
inline void merge(const Gathered &to, const Gathered &piece, int64_t rows, int64_t step) {
    for (int64_t row = 0; row < rows; ++row) {
        if (piece.weight[row] == 0) continue;  // nothing of it is visible
        const float peak = std::max(to.peak[row], piece.peak[row]);
        const float old_scale = std::exp(to.peak[row] - peak);
        const float new_scale = std::exp(piece.peak[row] - peak);
        to.peak[row] = peak;
        to.weight[row] = to.weight[row] * old_scale + piece.weight[row] * new_scale;
        for (int64_t i = 0; i < step; i += kLanes)
            store(to.mixed + row * step + i,
                  fused(load(to.mixed + row * step + i), all(old_scale),
                        load(piece.mixed + row * step + i) * new_scale));
    }
}

// ---- Products with runs -------------------------------------------------------------------------

#if defined(__AVX512F__)
constexpr int kRunsTogether = 4;
#else
constexpr int kRunsTogether = 1;
#endif
constexpr int kScoreRows = 6;

// Scores of R queries with some runs of keys, of which there may be fewer than kRunsTogether.
template <class T, class X, int R>
__attribute__((noinline)) void score_tile(const X *queries, int64_t dim, const T *const *runs,
                                          int64_t count, float *scores) {
    constexpr int kEach = int(kRun) / kLanes, kVectors = kRunsTogether * kEach;
    constexpr int64_t group = Operands<T>::group;
    const T *vectors[kVectors];
    for (int j = 0; j < kVectors; ++j)
        vectors[j] = runs[std::min<int64_t>(j / kEach, count - 1)] + j % kEach * kLanes * group;
    Floats total[R][kVectors] = {};
    for (int64_t k = 0; k < dim; k += group) {
        add_products(total, queries + k, dim, vectors);
        for (const T *&vector : vectors) vector += kRun * group;
    }
    for (int i = 0; i < R; ++i)
        for (int j = 0; j < count * kEach; ++j)
            store(scores + i * kKeys + j * kLanes, total[i][j]);
}

// Adds to R rows of `mixed` the values of runs, each of a number of positions, with their weights.
template <class T, class X, int R>
__attribute__((noinline)) void mix_tile(const X *weights, int64_t dim, const T *const *runs,
                                        const int64_t *positions, int64_t count, float *mixed,
                                        int64_t step) {
    constexpr int64_t group = Operands<T>::group;
    for (int64_t n = 0; n < dim; n += kTileVectors * kLanes) {
        Floats total[R][kTileVectors];
        for (int i = 0; i < R; ++i)
            for (int j = 0; j < kTileVectors; ++j)
                total[i][j] = load(mixed + i * step + n + j * kLanes);
        for (int64_t run = 0; run < count; ++run) {
            const T *vectors[kTileVectors];
            for (int j = 0; j < kTileVectors; ++j)
                vectors[j] = runs[run] + (n + j * kLanes) * group;
            for (int64_t k = 0; k < positions[run]; k += group) {
                add_products(total, weights + run * kRun + k, kKeys, vectors);
                for (const T *&vector : vectors) vector += dim * group;
            }
        }
        for (int i = 0; i < R; ++i)
            for (int j = 0; j < kTileVectors; ++j)
                store(mixed + i * step + n + j * kLanes, total[i][j]);
    }
}

// Calls of<R>(first row) for tiles of at most kMost rows.
template <int kMost, class Of> inline void for_tiles(int64_t rows, Of of) {
    int64_t row = 0;
    for (; row + kMost <= rows; row += kMost) of.template operator()<kMost>(row);
    [&]<int... R>(std::integer_sequence<int, R...>) {
        ((rows - row == R + 1 ? of.template operator()<R + 1>(row) : void()), ...);
    }(std::make_integer_sequence<int, kMost - 1>());
}

// T: of the KV pool. A thread has one of its own.
template <class T> class Attention {
  public:
    // Queries, and the weights of values, are of X.
    using X = typename Operands<T>::X;

    Attention(int64_t max_rows, int64_t head_dim)
        : dim_(head_dim), step_(banded_rows(head_dim)), rows_(max_rows + kSpare),
          queries_(new X[rows_ * dim_]()), keys_(new T[kKeys * dim_]()),
          values_(new T[kKeys * dim_ + kBand * kGroup]()), weights_(new X[rows_ * kKeys]()),
          scores_(new float[rows_ * kKeys]),
          memory_(new float[2 * Gathered::floats(rows_, step_)]),
          gathered_(Gathered::at(memory_.get(), rows_, step_)),
          piece_(Gathered::at(memory_.get() + Gathered::floats(rows_, step_), rows_, step_)) {}

    int64_t step() const { return step_; }  // of what is gathered, between rows
    X *queries() { return queries_.get(); }  // (rows, head_dim), to be filled before
    const Gathered &gathered() const { return gathered_; }
    const Gathered &piece() const { return piece_; }

    struct Keys {  // of one KV head and one sequence
        const T *keys, *values;  // the pools
        KVLayout<T> layout;
        int64_t head;
        const int32_t *table;

        int64_t slot(int64_t position) const {
            const int64_t block = position / layout.block_size;
            return table[block] * layout.block_size + position % layout.block_size;
        }
        int64_t start(int64_t position) const { return layout.start(slot(position), head); }
    };
    struct Rows {  // `group` rows a token; its positions follow each other
        int64_t first_position, tokens, group, window;

        int64_t count() const { return tokens * group; }
        int64_t last() const { return first_position + tokens - 1; }
        int64_t oldest(int64_t position) const {
            return window ? std::max<int64_t>(position - window + 1, 0) : 0;
        }
    };

    // Brings the positions of a piece that come first into the caches.
    void prefetch(const Keys &keys, const Rows &rows, int64_t piece) {
        const int64_t oldest = rows.oldest(rows.first_position) / kKeys * kKeys;
        prefetch(keys, std::max(piece * kPiece, oldest), rows.first_position);
    }

    // Over all pieces, into gathered().
    void attend(const Keys &keys, const Rows &rows) {
        gathered_.clear(rows.count(), step_);
        for (int64_t piece = rows.oldest(rows.first_position) / kPiece;
             piece * kPiece <= rows.last(); ++piece) {
            attend_piece(keys, rows, piece);
            merge(gathered_, piece_, rows.count(), step_);
        }
    }

    // Over one, into piece().
    void attend_piece(const Keys &keys, const Rows &rows, int64_t piece) {
        const int64_t count = rows.count();
        piece_.clear(count, step_);
        const int64_t begin = std::max(piece * kPiece, rows.oldest(rows.first_position));
        const int64_t end = std::min((piece + 1) * kPiece, rows.last() + 1);
        for (int64_t start = begin / kKeys * kKeys; start < end; start += kKeys) {
            const int64_t known = std::min(kKeys, end - start);
            prefetch(keys, start + kKeys, end);
            find(keys, start, known);
            score(count);
            soften(rows, start, runs_ * kRun);
            mix(count, known);
        }
    }

  private:
    static constexpr int64_t kGroup = Operands<T>::group;

    // Brings positions into the caches: a block table hides from the hardware which are next.
    void prefetch(const Keys &keys, int64_t start, int64_t end) {
        const bool is_packed = keys.layout.is_packed();
        const int64_t bytes = (is_packed ? kRun : 1) * dim_ * int64_t(sizeof(T));
        for (int64_t i = start; i < std::min(start + kKeys, end); i += is_packed ? kRun : 1) {
            const int64_t from = keys.start(i);
            for (const T *pool : {keys.keys, keys.values})
                for (int64_t byte = 0; byte < bytes; byte += 64)
                    __builtin_prefetch(reinterpret_cast<const char *>(pool + from) + byte, 0, 3);
        }
    }

    // Sets where the runs of `known` positions from `start` on are.
    void find(const Keys &keys, int64_t start, int64_t known) {
        runs_ = (known + kRun - 1) / kRun;
        for (int64_t run = 0; run < runs_; ++run) {
            const int64_t first = start + run * kRun;
            if (keys.layout.is_packed()) {
                key_runs_[run] = keys.keys + keys.start(first);
                value_runs_[run] = keys.values + keys.start(first);
                continue;
            }
            T *key = keys_.get() + run * kRun * dim_, *value = values_.get() + run * kRun * dim_;
            for (int64_t i = 0; i < std::min(kRun, known - run * kRun); ++i) {
                const int64_t from = keys.start(first + i);
                KVLayout<T>::put_key(key, keys.keys + from, i, dim_);
                KVLayout<T>::put_value(value, keys.values + from, i, dim_);
            }
            key_runs_[run] = key;
            value_runs_[run] = value;
        }
    }

    void score(int64_t rows) {
#if defined(PENSTOCK_TILES)
        if constexpr (std::is_same_v<T, bf16>)
            if (may_use_tiles()) {
                for (int64_t run = 0; run < runs_; run += 2) {
                    const T *right = key_runs_[std::min(run + 1, runs_ - 1)];
                    multiply_by_tiles(queries_.get(), dim_, rows,
                                      {key_runs_[run], right, kRun * kGroup}, dim_, true,
                                      scores_.get() + run * kRun, kKeys);
                }
                return;
            }
#endif
        for (int64_t run = 0; run < runs_; run += kRunsTogether)
            for_tiles<kScoreRows>(rows, [&]<int R>(int64_t row) {
                score_tile<T, X, R>(queries_.get() + row * dim_, dim_, key_runs_ + run,
                                    std::min<int64_t>(kRunsTogether, runs_ - run),
                                    scores_.get() + row * kKeys + run * kRun);
            });
    }

    // What lies behind the known positions is another sequence's, and may be no number.
    void mix(int64_t rows, int64_t known) {
#if defined(PENSTOCK_TILES)
        if constexpr (std::is_same_v<T, bf16>)
            if (may_use_tiles()) return mix_by_tiles(rows, known);
#endif
        int64_t positions[kRuns + 1];
        for (int64_t run = 0; run < runs_; ++run)
            positions[run] = std::min(kRun, known - run * kRun) / kGroup * kGroup;
        for_tiles<kTileRows>(rows, [&]<int R>(int64_t row) {
            mix_tile<T, X, R>(weights_.get() + row * kKeys, dim_, value_runs_, positions, runs_,
                              piece_.mixed + row * step_, step_);
        });
        const int64_t last = known % kRun;
        if (last % kGroup == 0) return;
        // The first of a pair without the second.
        const T *pair = value_runs_[runs_ - 1] + (last - 1) * dim_, *pairs[] = {last_pair(pair)};
        const int64_t together = kGroup;
        for_tiles<kTileRows>(rows, [&]<int R>(int64_t row) {
            mix_tile<T, X, R>(weights_.get() + row * kKeys + known - 1, dim_, pairs, &together, 1,
                              piece_.mixed + row * step_, step_);
        });
    }
    const T *last_pair(const T *pair) {
        T *to = pair_.get();
        for (int64_t n = 0; n < dim_ * kGroup; ++n) to[n] = n % kGroup ? T{} : pair[n];
        return to;
    }

#if defined(PENSTOCK_TILES)
    void mix_by_tiles(int64_t rows, int64_t known) {
        const int64_t length = (known + kDepth - 1) / kDepth * kDepth, row_step = dim_ * kGroup;
        T *to = packed_.get();
        for (int64_t i = 0; i < length; i += kGroup, to += row_step) {
            const T *from = value_runs_[std::min(i / kRun, runs_ - 1)] + i % kRun * dim_;
            for (int64_t n = 0; n < row_step; ++n)
                to[n] = i + n % kGroup < known ? from[n] : T{};
        }
        for (int64_t row = 0; row < rows; ++row)
            std::fill(weights_.get() + row * kKeys + runs_ * kRun,
                      weights_.get() + row * kKeys + length, X{});
        for (int64_t n = 0; n < step_; n += kBand) {
            const T *left = packed_.get() + n * kGroup;
            multiply_by_tiles(weights_.get(), kKeys, rows, {left, left + kTile * kGroup, row_step},
                              length, false, piece_.mixed + n, step_);
        }
    }
#endif

    // Turns scores into weights, 0 for positions that a row must not see, and scales what it has
    // gathered so far, so that its highest score has the weight 1.
    void soften(const Rows &rows, int64_t start, int64_t width) {
        const float scale = 1.0f / std::sqrt(float(dim_));
        for (int64_t row = 0; row < rows.count(); ++row) {
            const int64_t position = rows.first_position + row / rows.group;
            const int64_t begin = std::max<int64_t>(rows.oldest(position) - start, 0);
            const int64_t end = std::min(width, position + 1 - start);
            X *weights = weights_.get() + row * kKeys;
            if (begin >= end) {
                std::fill(weights, weights + width, X{});
                continue;
            }
            float *scores = scores_.get() + row * kKeys;
            if (begin > 0 || end < width) {
                std::fill(scores, scores + std::min(begin, width),
                          -std::numeric_limits<float>::infinity());
                std::fill(scores + end, scores + width, -std::numeric_limits<float>::infinity());
            }
            Floats peaks = load(scores);
            for (int64_t i = kLanes; i < width; i += kLanes) peaks = larger(peaks, load(scores + i));
            const float peak = std::max(piece_.peak[row], highest(peaks) * scale);
            const float shrink = std::exp(piece_.peak[row] - peak);
            Floats sums = {};
            for (int64_t i = 0; i < width; i += kLanes) {
                const Floats score = load(scores + i);
                const Floats weight = exp(score * scale - peak);
                const Floats seen =
                    score == -std::numeric_limits<float>::infinity() ? Floats{} : weight;
                sums += seen;
                store(weights + i, seen);
            }
            piece_.weight[row] = piece_.weight[row] * shrink + sum(sums);
            piece_.peak[row] = peak;
            if (shrink == 1) continue;
            float *mixed = piece_.mixed + row * step_;
            for (int64_t i = 0; i < step_; i += kLanes) store(mixed + i, load(mixed + i) * shrink);
        }
    }

    const int64_t dim_, step_, rows_;
    std::unique_ptr<X[]> queries_;
    std::unique_ptr<T[]> keys_, values_;  // runs of blocks that are not packed
    std::unique_ptr<X[]> weights_;
    std::unique_ptr<float[]> scores_, memory_;
    Gathered gathered_, piece_;
    std::unique_ptr<T[]> pair_{new T[(dim_ + kBand) * kGroup]()};
#if defined(PENSTOCK_TILES)
    std::unique_ptr<T[]> packed_{new T[kKeys * dim_ + kBand * kGroup]()};
#endif
    // Of the positions that are computed.
    int64_t runs_ = 0;
    const T *key_runs_[kRuns], *value_runs_[kRuns];
};
