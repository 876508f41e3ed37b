// Attention of one tile of queries to one KV head over the block table, by the online softmax of Milakov
// and Gimelshein 2018 (arXiv:1805.02867).
//
// Keys and values lie in the pool as products multiply with them (runs.h), and are taken 64 positions at a
// time by all queries of the tile, those of one group of heads among them. A sequence's positions are cut into the same pieces whoever computes them, and the pieces are merged in order: so a
// long context can be spread over threads, and a token has the same result as a decode and in a prompt.
#pragma once
#include <algorithm>
#include <limits>
#include <memory>

#include "runs.h"
#include "structs.h"

constexpr int64_t kPiece = 512;  // positions of a piece

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

// Runs: what keys and values are, such as PlainRuns. A thread has one of its own.
template <class Runs> class Attention {
  public:
    using X = typename Runs::X;
    using Keys = ::Keys<typename Runs::KV>;

    Attention(int64_t max_rows, int64_t head_dim)
        : dim_(head_dim), step_(banded_rows(head_dim)), rows_(max_rows + kSpare), runs_(head_dim),
          queries_(new X[rows_ * dim_]()), weights_(new X[rows_ * kKeys]()),
          scores_(new float[rows_ * kKeys]),
          memory_(new float[2 * Gathered::floats(rows_, step_)]),
          gathered_(Gathered::at(memory_.get(), rows_, step_)),
          piece_(Gathered::at(memory_.get() + Gathered::floats(rows_, step_), rows_, step_)) {}

    int64_t step() const { return step_; }  // of what is gathered, between rows
    X *queries() { return queries_.get(); }  // (rows, head_dim), to be filled and taken before
    void take(int64_t rows) { runs_.take(queries_.get(), rows); }
    const Gathered &gathered() const { return gathered_; }
    const Gathered &piece() const { return piece_; }

    struct Rows {  // `group` rows a token; its positions follow each other
        int64_t first_position, tokens, group, window;

        int64_t count() const { return tokens * group; }
        int64_t last() const { return first_position + tokens - 1; }
        int64_t oldest(int64_t position) const {
            return window ? std::max<int64_t>(position - window + 1, 0) : 0;
        }
    };

    struct Positions {  // at most kKeys of one head
        Keys keys;
        int64_t start, count;
    };
    // Of a piece, those that are attended to first. Positions that this step stores are not in memory yet.
    static Positions first_of(const Keys &keys, const Rows &rows, int64_t piece) {
        const int64_t oldest = rows.oldest(rows.first_position) / kKeys * kKeys;
        const int64_t start = std::max(piece * kPiece, oldest);
        return {keys, start, std::clamp<int64_t>(rows.first_position - start, 0, kKeys)};
    }

    // Over all pieces, into gathered(). Meanwhile, what is attended to next comes into the caches.
    __attribute__((noinline)) void attend(const Keys &keys, const Rows &rows,
                                          const Positions &next) {
        gathered_.clear(rows.count(), step_);
        for (int64_t piece = rows.oldest(rows.first_position) / kPiece;
             piece * kPiece <= rows.last(); ++piece) {
            const bool is_last = (piece + 1) * kPiece > rows.last();
            attend_piece(keys, rows, piece, is_last ? next : first_of(keys, rows, piece + 1));
            merge(gathered_, piece_, rows.count(), step_);
        }
    }

    // Over one, into piece().
    __attribute__((noinline)) void attend_piece(const Keys &keys, const Rows &rows,
                                                int64_t piece, const Positions &next) {
        const int64_t count = rows.count();
        piece_.clear(count, step_);
        const int64_t begin = std::max(piece * kPiece, rows.oldest(rows.first_position));
        const int64_t end = std::min((piece + 1) * kPiece, rows.last() + 1);
        for (int64_t start = begin / kKeys * kKeys; start < end; start += kKeys) {
            const int64_t known = std::min(kKeys, end - start);
            runs_.find(keys, start, known);
            if (start + kKeys < end)
                runs_.look_ahead(keys, start + kKeys, std::min(kKeys, end - start - kKeys));
            else
                runs_.look_ahead(next.keys, next.start, next.count);
            runs_.score(queries_.get(), count, scores_.get());
            soften(rows, start, runs_.width());
            runs_.mix(weights_.get(), count, known, piece_.mixed, step_);
        }
    }

  private:
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
            const bool sees_all = begin == 0 && end == width;
            if (!sees_all) {
                std::fill(scores, scores + std::min(begin, width),
                          -std::numeric_limits<float>::infinity());
                std::fill(scores + end, scores + width, -std::numeric_limits<float>::infinity());
            }
            Floats peaks = load(scores);
            for (int64_t i = kLanes; i < width; i += kLanes) peaks = larger(peaks, load(scores + i));
            const float old = piece_.peak[row], peak = std::max(old, highest(peaks) * scale);
            const float shrink = peak == old ? 1.0f : std::exp(old - peak);
            Floats sums = {};
            for (int64_t i = 0; i < width; i += kLanes) {
                const Floats score = load(scores + i);
                Floats weight = exp(score * scale - peak);
                if (!sees_all)
                    weight = score == -std::numeric_limits<float>::infinity() ? Floats{} : weight;
                sums += weight;
                store(weights + i, weight);
            }
            piece_.weight[row] = piece_.weight[row] * shrink + sum(sums);
            piece_.peak[row] = peak;
            if (shrink == 1) continue;
            float *mixed = piece_.mixed + row * step_;
            for (int64_t i = 0; i < step_; i += kLanes) store(mixed + i, load(mixed + i) * shrink);
        }
    }

    const int64_t dim_, step_, rows_;
    Runs runs_;
    std::unique_ptr<X[]> queries_, weights_;
    std::unique_ptr<float[]> scores_, memory_;
    Gathered gathered_, piece_;
};
