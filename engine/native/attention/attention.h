// Attention of one tile of queries to one KV head over the block table, by the online softmax of Milakov
// and Gimelshein 2018 (arXiv:1805.02867). attention.cpp computes it.
//
// Keys and values lie in the pool as products multiply with them (runs.h), and are taken 64 positions at a
// time by all queries of the tile, those of one group of heads among them. A sequence's positions are cut into
// the same pieces whoever computes them, and the pieces are merged in order: so a long context can be spread
// over threads, and a token has the same result as a decode and in a prompt.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>

#include "native/step/rows.h"
#include "native/step/structs.h"
#include "native/products/vectors.h"

constexpr int64_t kPiece = 512;  // positions of a piece, at most
constexpr int64_t kKeys = 64;    // positions that are taken together
constexpr int64_t kRun = 16;     // positions that are packed together: the lanes of the widest vectors

// Where a run, or a position, of a head begins in a pool: runs are packed together where blocks are whole
// runs, and other positions lie row by row.
//
// Where values are the beginning of keys, latent_dim numbers, all lie row by row, as products with both need them packed
// in two ways: which costs less than the products, since all heads share them.
struct KVPlaces {
    int64_t block_size, kv_heads, head_dim, latent_dim;

    bool is_packed() const { return block_size % kRun == 0 && !latent_dim; }
    // Positions of a piece: fewer where all heads are one unit of work.
    int64_t piece() const { return latent_dim ? kPiece / 2 : kPiece; }
    int64_t start(int64_t slot, int64_t head) const {
        if (is_packed()) return (slot / kRun * kv_heads + head) * kRun * head_dim;
        return (slot * kv_heads + head) * head_dim;
    }
};

// One layer's keys and values of one sequence and KV head.
struct HeadKeys {
    const AttentionLayer *layer;
    KVPlaces places;
    int64_t head;
    const int32_t *table;
};

struct Rows {  // `group` rows a token; its positions follow each other
    int64_t first_position, tokens, group, window;
    const int64_t *reaches;  // of the tokens, see Step, or null
    int64_t ahead = 0;       // how many positions a token attends to from its own on; 0: as far as it reaches

    int64_t count() const { return tokens * group; }
    int64_t reach(int64_t token) const {
        if (!reaches) return first_position + token + 1;
        return ahead ? std::min(reaches[token], first_position + token + ahead) : reaches[token];
    }
    int64_t end() const {  // the position after the last that any attends to
        if (!reaches) return first_position + tokens;
        const int64_t end = *std::max_element(reaches, reaches + tokens);
        return ahead ? std::min(end, first_position + tokens - 1 + ahead) : end;
    }
    int64_t oldest(int64_t position) const {
        return window ? std::max<int64_t>(position - window + 1, 0) : 0;
    }
};

struct Positions {  // at most kKeys of one head
    HeadKeys keys;
    int64_t start, count;
};
// Returns those of a piece that are attended to first. Positions that this step stores are not in memory yet.
inline Positions first_of(const HeadKeys &keys, const Rows &rows, int64_t piece) {
    const int64_t oldest = rows.oldest(rows.first_position) / kKeys * kKeys;
    const int64_t start = std::max(piece * keys.places.piece(), oldest);
    return {keys, start, std::clamp<int64_t>(rows.first_position - start, 0, kKeys)};
}

// Rows of queries have gathered this over some positions.
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

class Attention {
  public:
    virtual ~Attention() = default;

    // Stores a position, whose value is multiplied by a factor; not where values are the beginning of keys.
    virtual void put(const HeadKeys &to, int64_t slot, const float *key, const Rotation &by, const float *value,
                     float factor) = 0;

    // A row of the tile; take() follows the last.
    virtual void put_query(int64_t row, const float *head, const Rotation &by) = 0;
    virtual void take(int64_t rows) = 0;

    // Over all pieces, into gathered(). Meanwhile, what is attended to next comes into the caches.
    virtual void attend(const HeadKeys &keys, const Rows &rows, const Positions &next) = 0;
    // Over one, into piece().
    virtual void attend_piece(const HeadKeys &keys, const Rows &rows, int64_t piece, const Positions &next) = 0;

    int64_t step() const { return step_; }  // of what is gathered, between rows
    const Gathered &gathered() const { return gathered_; }
    const Gathered &piece() const { return piece_; }

  protected:
    int64_t step_ = 0;
    Gathered gathered_ = {}, piece_ = {};
};
