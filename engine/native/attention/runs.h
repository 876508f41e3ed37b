// Keys and values of 64 positions of one sequence and KV head, as the pool has them: how they are stored,
// scores of queries with them, and sums of values.
#pragma once
#include <algorithm>
#include <memory>
#include <type_traits>

#include "attention.h"
#include "native/products/products.h"
#include "native/step/structs.h"

constexpr int64_t kRuns = kKeys / kRun;

// Into the second cache: a core of a Zen 4 has twice as many lines on their way there as to the first, and reads
// pieces of 2 KiB at 18 GB/s instead of 9.
inline void prefetch_line(const void *at) { __builtin_prefetch(at, 0, 2); }
constexpr int kLineVectors = 64 / sizeof(Words);

// One layer's pool of T, whose keys are packed as [head_dim / group][16][group], so that lanes are positions,
// and values as [16 / group][head_dim][group], so that lanes are the head's numbers.
template <class T> struct PlainKV {
    using Stored = T;  // what a position is stored from
    static constexpr int64_t group = Operands<T>::group;
    T *keys, *values;
    KVPlaces places;

    PlainKV(const AttentionLayer &layer, const KVPlaces &at)
        : keys(static_cast<T *>(layer.keys)), values(static_cast<T *>(layer.values)), places(at) {}

    static void put_key(T *run, const T *key, int64_t at, int64_t head_dim) {
        for (int64_t k = 0; k < head_dim; ++k)
            run[k / group * kRun * group + at * group + k % group] = key[k];
    }
    static void put_value(T *run, const T *value, int64_t at, int64_t head_dim) {
        T *to = run + at / group * group * head_dim + at % group;
        for (int64_t n = 0; n < head_dim; ++n) to[n * group] = value[n];
    }
    // The same of all positions of a run.
    static void put_keys(T *run, const T *const *keys, int64_t head_dim) {
        int64_t k = 0;
        if constexpr (sizeof(T) * group == sizeof(std::uint32_t))  // then a word has a group
            for (; k + kLanes * group <= head_dim; k += kLanes * group)
                for (int64_t at = 0; at < kRun; at += kLanes) {
                    Words square[kLanes];
                    for (int i = 0; i < kLanes; ++i)
                        square[i] = *reinterpret_cast<const Words *>(keys[at + i] + k);
                    transpose(square);
                    for (int i = 0; i < kLanes; ++i)
                        *reinterpret_cast<Words *>(run + (k + i * group) * kRun + at * group) = square[i];
                }
        for (; k < head_dim; ++k)
            for (int64_t at = 0; at < kRun; ++at)
                run[k / group * kRun * group + at * group + k % group] = keys[at][k];
    }
    static void put_values(T *run, const T *const *values, int64_t value_dim) {
        for (int64_t at = 0; at < kRun; at += group)
            for (int64_t n = 0; n < value_dim; ++n)
                for (int64_t i = 0; i < group; ++i)
                    run[at * value_dim + n * group + i] = values[at + i][n];
    }
    void put(int64_t slot, int64_t head, const T *key, const T *value) const {
        const int64_t from = places.start(slot, head), dim = places.head_dim;
        if (places.is_packed()) {
            put_key(keys + from, key, slot % kRun, dim);
            put_value(values + from, value, slot % kRun, dim);
        } else {
            std::copy_n(key, dim, keys + from);
            if (!places.latent_dim) std::copy_n(value, dim, values + from);
        }
    }
};

// One KV head of one sequence.
template <class KV> struct Keys {
    KV pool;
    int64_t head;
    const int32_t *table;

    int64_t slot(int64_t position) const {
        const int64_t size = pool.places.block_size;
        return table[position / size] * size + position % size;
    }
    int64_t start(int64_t position) const { return pool.places.start(slot(position), head); }

    // Brings positions into the caches: a block table hides from the hardware which are next.
    void prefetch(int64_t first, int64_t count) const {
        const int64_t each = pool.places.is_packed() ? kRun : 1;
        const int64_t bytes = each * pool.places.head_dim * int64_t(sizeof *pool.keys);
        for (int64_t i = first; i < first + count; i += each) {
            const int64_t from = start(i);
            const char *memories[] = {reinterpret_cast<const char *>(pool.keys + from),
                                      reinterpret_cast<const char *>(pool.values + from)};
            for (int i = 0; i < (pool.places.latent_dim ? 1 : 2); ++i)
                for (int64_t byte = 0; byte < bytes; byte += 64) prefetch_line(memories[i] + byte);
        }
    }
};

// Where the next positions lie in the pool, which products with these bring into the caches, line by line.
template <class Key, class Value> struct NextRuns {
    const Key *keys[kRuns];
    const Value *values[kRuns];

    // Positions from `start` on, of which `known` are the sequence's.
    template <class KV> void find(const Keys<KV> &of, int64_t start, int64_t known) {
        for (int64_t run = 0; run < kRuns; ++run) {
            const int64_t from = of.start(start + std::min(run * kRun, (known - 1) / kRun * kRun));
            keys[run] = of.pool.keys + from;
            values[run] = of.pool.values + from;
        }
    }
};

// ---- Products with runs of numbers of T ----------------------------------------------------------

#if defined(__AVX512F__)
constexpr int kRunsTogether = 4;
#else
constexpr int kRunsTogether = 1;
#endif
constexpr int kScoreRows = 6;

// Scores of R queries with some runs of keys, of which there may be fewer than kRunsTogether. `next`, which may
// be null: the runs to bring into the caches meanwhile.
template <class T, class X, int R>
__attribute__((noinline)) void score_tile(const X *queries, int64_t dim, const T *const *runs,
                                          int64_t count, const T *const *next, float *scores) {
    constexpr int kEach = int(kRun) / kLanes, kVectors = kRunsTogether * kEach;
    constexpr int64_t group = Operands<T>::group;
    const T *vectors[kVectors];
    for (int j = 0; j < kVectors; ++j)
        vectors[j] = runs[std::min<int64_t>(j / kEach, count - 1)] + j % kEach * kLanes * group;
    Floats total[R][kVectors] = {};
    for (int64_t k = 0; k < dim; k += group) {
        if (next)
            for (int j = 0; j < kRunsTogether; ++j) prefetch_line(next[j] + k * kRun);
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
                                        const int64_t *positions, int64_t count,
                                        const T *const *next, float *mixed, int64_t step) {
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
                if (next)
                    for (int j = 0; j < kTileVectors; j += kLineVectors)
                        prefetch_line(next[run] + (vectors[j] - runs[run]));
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

// A thread has one of its own.
template <class T> class PlainRuns {
  public:
    using KV = PlainKV<T>;
    using X = typename Operands<T>::X;  // of queries, and of the weights of values

    PlainRuns(int64_t head_dim, int64_t value_dim)
        : dim_(head_dim), value_dim_(value_dim), keys_(new T[kKeys * dim_]()),
          values_(new T[kKeys * dim_ + kBand * kGroup]()), pair_(new T[(dim_ + kBand) * kGroup]()),
          packed_(new T[kKeys * dim_ + kBand * kGroup]()) {}

    int64_t width() const { return runs_ * kRun; }  // of the positions that were found, in whole runs
    void take(const X *, int64_t) {}                // queries are multiplied as they are

    // Sets where the runs of `known` positions from `start` on are.
    void find(const Keys<PlainKV<T>> &keys, int64_t start, int64_t known) {
        runs_ = (known + kRun - 1) / kRun;
        for (int64_t run = 0; run < runs_; ++run) {
            const int64_t first = start + run * kRun;
            if (keys.pool.places.is_packed()) {
                key_runs_[run] = keys.pool.keys + keys.start(first);
                value_runs_[run] = keys.pool.values + keys.start(first);
                continue;
            }
            T *key = keys_.get() + run * kRun * dim_, *value = values_.get() + run * kRun * value_dim_;
            const T *key_rows[kRun], *value_rows[kRun];  // behind those that are known, the last again
            for (int64_t i = 0; i < kRun; ++i) {
                const int64_t from = keys.start(first + std::min(i, known - run * kRun - 1));
                key_rows[i] = keys.pool.keys + from;
                value_rows[i] = keys.pool.values + from;
            }
            PlainKV<T>::put_keys(key, key_rows, dim_);
            PlainKV<T>::put_values(value, value_rows, value_dim_);
            key_runs_[run] = key;
            value_runs_[run] = value;
        }
    }

    // Products with these runs bring this into the caches.
    void look_ahead(const Keys<PlainKV<T>> &keys, int64_t start, int64_t known) {
        has_next_ = known > 0 && keys.pool.places.is_packed() && !uses_tiles();
        if (has_next_)
            next_.find(keys, start, known);
        else
            keys.prefetch(start, known);
    }

    // Scores rows of queries, (rows, head_dim), to (rows, 64).
    void score(const X *queries, int64_t rows, float *scores) {
#if defined(PENSTOCK_TILES)
        if constexpr (std::is_same_v<T, bf16>)
            if (uses_tiles()) {
                for (int64_t run = 0; run < runs_; run += 2) {
                    const T *right = key_runs_[std::min(run + 1, runs_ - 1)];
                    multiply_by_tiles(queries, dim_, rows,
                                      {key_runs_[run], right, kRun * kGroup}, dim_, true,
                                      scores + run * kRun, kKeys);
                }
                return;
            }
#endif
        for (int64_t run = 0; run < runs_; run += kRunsTogether)
            for_tiles<kScoreRows>(rows, [&]<int R>(int64_t row) {
                score_tile<T, X, R>(queries + row * dim_, dim_, key_runs_ + run,
                                    std::min<int64_t>(kRunsTogether, runs_ - run),
                                    row || !has_next_ ? nullptr : next_.keys + run,
                                    scores + row * kKeys + run * kRun);
            });
    }

    // Adds values with their weights (rows, 64) to rows of `mixed`. What lies behind the known positions is
    // another sequence's, and may be no number.
    void mix(X *weights, int64_t rows, int64_t known, float *mixed, int64_t step) {
#if defined(PENSTOCK_TILES)
        if constexpr (std::is_same_v<T, bf16>)
            if (uses_tiles()) return mix_by_tiles(weights, rows, known, mixed, step);
#endif
        int64_t positions[kRuns];
        for (int64_t run = 0; run < runs_; ++run)
            positions[run] = std::min(kRun, known - run * kRun) / kGroup * kGroup;
        for_tiles<kTileRows>(rows, [&]<int R>(int64_t row) {
            mix_tile<T, X, R>(weights + row * kKeys, value_dim_, value_runs_, positions, runs_,
                              row || !has_next_ ? nullptr : next_.values, mixed + row * step, step);
        });
        const int64_t last = known % kRun;
        if (last % kGroup == 0) return;
        // The first of a pair without the second.
        const T *pair = value_runs_[runs_ - 1] + (last - 1) * value_dim_, *pairs[] = {last_pair(pair)};
        const int64_t together = kGroup;
        for_tiles<kTileRows>(rows, [&]<int R>(int64_t row) {
            mix_tile<T, X, R>(weights + row * kKeys + known - 1, value_dim_, pairs, &together, 1, nullptr,
                              mixed + row * step, step);
        });
    }

  private:
    static constexpr int64_t kGroup = Operands<T>::group;

    static bool uses_tiles() {
#if defined(PENSTOCK_TILES)
        return std::is_same_v<T, bf16> && may_use_tiles();
#else
        return false;
#endif
    }

    const T *last_pair(const T *pair) {
        T *to = pair_.get();
        for (int64_t n = 0; n < value_dim_ * kGroup; ++n) to[n] = n % kGroup ? T{} : pair[n];
        return to;
    }

#if defined(PENSTOCK_TILES)
    void mix_by_tiles(X *weights, int64_t rows, int64_t known, float *mixed, int64_t step) {
        const int64_t length = (known + kDepth - 1) / kDepth * kDepth, row_step = value_dim_ * kGroup;
        T *to = packed_.get();
        for (int64_t i = 0; i < length; i += kGroup, to += row_step) {
            const T *from = value_runs_[std::min(i / kRun, runs_ - 1)] + i % kRun * value_dim_;
            if (i + kGroup <= known)
                std::copy_n(from, row_step, to);
            else
                for (int64_t n = 0; n < row_step; ++n) to[n] = i + n % kGroup < known ? from[n] : T{};
        }
        for (int64_t row = 0; row < rows; ++row)
            std::fill(weights + row * kKeys + runs_ * kRun, weights + row * kKeys + length, X{});
        for (int64_t n = 0; n < step; n += kBand) {
            const T *left = packed_.get() + n * kGroup;
            multiply_by_tiles(weights, kKeys, rows, {left, left + kTile * kGroup, row_step},
                              length, false, mixed + n, step);
        }
    }
#endif

    const int64_t dim_, value_dim_;
    std::unique_ptr<T[]> keys_, values_;  // of blocks that are not packed
    std::unique_ptr<T[]> pair_, packed_;
    // These are of the positions that were found.
    int64_t runs_ = 0;
    const T *key_runs_[kRuns], *value_runs_[kRuns];
    bool has_next_ = false;
    NextRuns<T, T> next_;
};
