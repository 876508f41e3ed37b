// As runs.h, of keys and values of 8 bits with a scale for each position and head.
//
// Queries are rounded to 8 bits too, with a scale for each head of each token, and the weights of 64 values to 14
// bits with a scale for each row, in two halves. So all products are sums of whole numbers.
#pragma once
#include <algorithm>
#include <memory>

#include "native/products/grouped.h"
#include "runs.h"
#include "native/step/structs.h"

// One layer's pool. Keys are packed as [head_dim / 4][16][4], unsigned and 128 too large, values as
// [16 / 4][head_dim][4]; scales are (num_blocks, num_kv_heads, block_size).
struct CodedKV {
    using Stored = float;
    unsigned char *keys;
    std::int8_t *values;
    float *key_scales, *value_scales;
    KVPlaces places;

    CodedKV(const AttentionLayer &layer, const KVPlaces &at)
        : keys(static_cast<unsigned char *>(layer.keys)),
          values(static_cast<std::int8_t *>(layer.values)), key_scales(layer.key_scales),
          value_scales(layer.value_scales), places(at) {}

    int64_t scale_at(int64_t slot, int64_t head) const {
        const int64_t size = places.block_size;
        return (slot / size * places.kv_heads + head) * size + slot % size;
    }
    void put(int64_t slot, int64_t head, const float *key, const float *value) const {
        const int64_t dim = places.head_dim, from = places.start(slot, head);
        std::int8_t key_codes[kMostCodes], value_codes[kMostCodes];
        std::int32_t sum;
        key_scales[scale_at(slot, head)] = coded(key, dim, key_codes, &sum);
        if (places.latent_dim) return void(std::memcpy(keys + from, key_codes, dim));
        value_scales[scale_at(slot, head)] = coded(value, dim, value_codes, &sum);
        if (places.is_packed()) {
            put_key(keys + from, key_codes, slot % kRun, dim);
            put_value(values + from, value_codes, slot % kRun, dim);
        } else {
            std::memcpy(keys + from, key_codes, dim);
            std::memcpy(values + from, value_codes, dim);
        }
    }
    static void put_key(unsigned char *run, const std::int8_t *codes, int64_t at, int64_t dim) {
        for (int64_t k = 0; k < dim; ++k)
            run[(k / 4 * kRun + at) * 4 + k % 4] = (unsigned char)(codes[k] ^ 0x80);
    }
    static void put_value(std::int8_t *run, const std::int8_t *codes, int64_t at, int64_t dim) {
        std::int8_t *to = run + at / 4 * 4 * dim + at % 4;
        for (int64_t n = 0; n < dim; ++n) to[4 * n] = codes[n];
    }

    static constexpr int64_t kMostCodes = 1024;  // of one head
};

// Scores of R queries with one run of keys. `next` is as in score_tile.
template <int R>
inline void score_codes(const std::int8_t *queries, int64_t dim, const unsigned char *run,
                        const float *query_scales, const std::int32_t *sums,
                        const float *key_scales, const unsigned char *next, float *scores) {
    constexpr int kEach = int(kRun) / kLanes;
    Ints dot[R][kEach];
    for (int i = 0; i < R; ++i)
        for (int j = 0; j < kEach; ++j) {
#if defined(PENSTOCK_SIGNED_BYTES)
            dot[i][j] = Ints{};
#else
            dot[i][j] = every(sums + i) * -128;
#endif
        }
    for (int64_t k = 0; k < dim; k += 4, run += 4 * kRun) {
        if (next) prefetch_line(next + k * kRun);
        for (int j = 0; j < kEach; ++j) {
            Words quads = keep(reinterpret_cast<const Words *>(run)[j]);
#if defined(PENSTOCK_SIGNED_BYTES)
            quads = quads ^ 0x80808080u;
#endif
#pragma GCC unroll 8
            for (int i = 0; i < R; ++i)
                dot[i][j] = add_quads(dot[i][j], quads, (Words)every(queries + i * dim + k));
        }
    }
    for (int i = 0; i < R; ++i)
        for (int j = 0; j < kEach; ++j)
            store(scores + i * kKeys + j * kLanes,
                  __builtin_convertvector(dot[i][j], Floats) * load(key_scales + j * kLanes) *
                      query_scales[i]);
}

// The weights of 64 values in a row: 14 bits in two halves of 7, and their scale.
struct CodedWeights {
    unsigned char high[kKeys], low[kKeys];
    float scale;

    void take(const float *weights, const float *value_scales, int64_t count) {
        typedef unsigned char Bytes __attribute__((vector_size(kLanes), aligned(1), may_alias));
        float scaled[kKeys] = {};
        for (int64_t i = 0; i < count; ++i) scaled[i] = weights[i] * value_scales[i];
        Ints sizes = {};
        for (int64_t i = 0; i < kKeys; i += kLanes) sizes = larger_size(sizes, load(scaled + i));
        const float peak = peak_of(sizes, 0);
        const float inverse = peak > 0 ? 16383.0f / peak : 0.0f;
        for (int64_t i = 0; i < kKeys; i += kLanes) {
            const Ints whole = whole_numbers(load(scaled + i) * inverse);
            *reinterpret_cast<Bytes *>(high + i) = __builtin_convertvector(whole >> 7 & 127, Bytes);
            *reinterpret_cast<Bytes *>(low + i) = __builtin_convertvector(whole & 127, Bytes);
        }
        scale = peak < INFINITY ? peak / 16383.0f : NAN;
    }
};

// Adds to R rows of `mixed` the values of some runs.
template <int R>
inline void mix_codes(const CodedWeights *weights, int64_t dim, const std::int8_t *const *runs,
                      int64_t count, const std::int8_t *const *next, float *mixed, int64_t step) {
    constexpr int V = 2;
    for (int64_t n = 0; n < dim; n += V * kLanes) {
        Ints high[R][V] = {}, low[R][V] = {};
        for (int64_t run = 0; run < count; ++run)
            for (int64_t k = 0; k < kRun; k += 4) {
                Words values[V];
                for (int j = 0; j < V; ++j) {
                    const int64_t at = k * dim + (n + j * kLanes) * 4;
                    if (next && j % kLineVectors == 0) prefetch_line(next[run] + at);
                    values[j] = keep(*reinterpret_cast<const Words *>(runs[run] + at));
                }
#pragma GCC unroll 8
                for (int i = 0; i < R; ++i) {
                    const Words high_weights = (Words)every(weights[i].high + run * kRun + k);
                    const Words low_weights = (Words)every(weights[i].low + run * kRun + k);
                    for (int j = 0; j < V; ++j) {
                        high[i][j] = add_quads(high[i][j], high_weights, values[j]);
                        low[i][j] = add_quads(low[i][j], low_weights, values[j]);
                    }
                }
            }
        for (int i = 0; i < R; ++i)
            for (int j = 0; j < V; ++j) {
                float *to = mixed + i * step + n + j * kLanes;
                const Floats sum = __builtin_convertvector((high[i][j] << 7) + low[i][j], Floats);
                store(to, fused(sum, all(weights[i].scale), load(to)));
            }
    }
}

// A thread has one of its own.
class CodedRuns {
  public:
    using KV = CodedKV;
    using X = float;

    CodedRuns(int64_t head_dim, int64_t value_dim)
        : dim_(head_dim), value_dim_(value_dim), keys_(new unsigned char[kKeys * dim_]()),
          values_(new std::int8_t[kKeys * dim_ + kSpareBytes]()) {}

    int64_t width() const { return runs_ * kRun; }

    // Sets where the runs of `known` positions from `start` on are.
    void find(const Keys<CodedKV> &keys, int64_t start, int64_t known) {
        const CodedKV &pool = keys.pool;
        runs_ = (known + kRun - 1) / kRun;
        for (int64_t run = 0; run < runs_; ++run) {
            const int64_t first = start + run * kRun, count = std::min(kRun, known - run * kRun);
            float *key_scales = key_scales_ + run * kRun, *value_scales = value_scales_ + run * kRun;
            if (pool.places.is_packed()) {
                const int64_t slot = keys.slot(first), at = pool.scale_at(slot, keys.head);
                std::copy_n(pool.key_scales + at, kRun, key_scales);
                std::copy_n(pool.value_scales + at, count, value_scales);
                key_runs_[run] = pool.keys + keys.start(first);
                value_runs_[run] = pool.values + keys.start(first);
                continue;
            }
            unsigned char *key = keys_.get() + run * kRun * dim_;
            std::int8_t *value = values_.get() + run * kRun * value_dim_;
            for (int64_t i = 0; i < count; ++i) {
                const int64_t slot = keys.slot(first + i), from = keys.start(first + i);
                key_scales[i] = pool.key_scales[pool.scale_at(slot, keys.head)];
                value_scales[i] = pool.value_scales[pool.scale_at(slot, keys.head)];
                const auto *codes = reinterpret_cast<const std::int8_t *>(pool.keys + from);
                CodedKV::put_key(key, codes, i, dim_);
                CodedKV::put_value(value, pool.values + from, i, value_dim_);
            }
            key_runs_[run] = key;
            value_runs_[run] = value;
        }
    }

    // Products with these runs bring this into the caches; scales at once.
    void look_ahead(const Keys<CodedKV> &keys, int64_t start, int64_t known) {
        has_next_ = known > 0 && keys.pool.places.is_packed();
        if (!has_next_) return keys.prefetch(start, known);
        next_.find(keys, start, known);
        for (int64_t run = 0; run < known; run += kRun) {
            const int64_t at = keys.pool.scale_at(keys.slot(start + run), keys.head);
            prefetch_line(keys.pool.key_scales + at);
            prefetch_line(keys.pool.value_scales + at);
        }
    }

    // Rounds the queries that the next scores are of.
    void take(const float *queries, int64_t rows) {
        if (rows > int64_t(query_scales_.size())) {
            queries_.resize(rows * dim_);
            query_scales_.resize(rows);
            sums_.resize(rows);
        }
        for (int64_t row = 0; row < rows; ++row)
            query_scales_[row] =
                coded(queries + row * dim_, dim_, &queries_[row * dim_], &sums_[row]);
    }

    void score(const float *, int64_t rows, float *scores) {
        for (int64_t run = 0; run < runs_; ++run)
            for_tiles<kScoreRows>(rows, [&]<int R>(int64_t row) {
                score_codes<R>(&queries_[row * dim_], dim_, key_runs_[run], &query_scales_[row],
                               &sums_[row], key_scales_ + run * kRun,
                               row || !has_next_ ? nullptr : next_.keys[run],
                               scores + row * kKeys + run * kRun);
            });
    }

    void mix(const float *weights, int64_t rows, int64_t known, float *mixed, int64_t step) {
        if (rows > int64_t(weights_.size())) weights_.resize(rows);
        for (int64_t row = 0; row < rows; ++row)
            weights_[row].take(weights + row * kKeys, value_scales_, known);
        for_tiles<kScoreRows>(rows, [&]<int R>(int64_t row) {
            mix_codes<R>(&weights_[row], value_dim_, value_runs_, runs_,
                         row || !has_next_ ? nullptr : next_.values, mixed + row * step, step);
        });
    }

  private:
    static constexpr int64_t kSpareBytes = 8 * kLanes;  // vectors end behind the last head

    const int64_t dim_, value_dim_;
    std::unique_ptr<unsigned char[]> keys_;  // of blocks that are not packed
    std::unique_ptr<std::int8_t[]> values_;
    std::vector<std::int8_t> queries_;
    std::vector<float> query_scales_;
    std::vector<std::int32_t> sums_;
    std::vector<CodedWeights> weights_;
    // These are of the positions that were found.
    int64_t runs_ = 0;
    const unsigned char *key_runs_[kRuns];
    const std::int8_t *value_runs_[kRuns];
    float key_scales_[kKeys], value_scales_[kKeys];
    bool has_next_ = false;
    NextRuns<unsigned char, std::int8_t> next_;
};
