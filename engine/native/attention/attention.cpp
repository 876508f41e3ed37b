// Attention to the keys and values of one kind of pool: numbers of PENSTOCK_WEIGHTS, or codes of 8 bits.
#include "attention.h"

#include <memory>

#include "coded_runs.h"
#include "runs.h"
#include "native/step/weights.h"

namespace {

// Runs: what keys and values are, such as PlainRuns.
template <class Runs> class AttentionTo final : public Attention {
    using X = typename Runs::X;
    using KV = typename Runs::KV;
    using Stored = typename KV::Stored;

  public:
    AttentionTo(int64_t max_rows, int64_t head_dim, int64_t value_dim)
        : dim_(head_dim), rows_(max_rows + kSpare), runs_(head_dim, value_dim), queries_(new X[rows_ * dim_]()),
          weights_(new X[rows_ * kKeys]()), stored_(new Stored[2 * dim_]), scores_(new float[rows_ * kKeys]),
          memory_(new float[2 * Gathered::floats(rows_, banded_rows(value_dim))]) {
        step_ = banded_rows(value_dim);
        gathered_ = Gathered::at(memory_.get(), rows_, step_);
        piece_ = Gathered::at(memory_.get() + Gathered::floats(rows_, step_), rows_, step_);
    }

    void put(const HeadKeys &to, int64_t slot, const float *key, const Rotation &by, const float *value,
             float factor) override {
        const int64_t dim = dim_;
        Stored *stored = stored_.get();
        rotate(key, dim, by, stored);
        int64_t i = to.places.latent_dim ? dim : 0;
        for (; i + kLanes <= dim; i += kLanes) store(stored + dim + i, load(value + i) * factor);
        for (; i < dim; ++i) store(stored + dim + i, value[i] * factor);
        KV(*to.layer, to.places).put(slot, to.head, stored, stored + dim);
    }
    void put_query(int64_t row, const float *head, const Rotation &by) override {
        rotate(head, dim_, by, queries_.get() + row * dim_);
    }
    void take(int64_t rows) override { runs_.take(queries_.get(), rows); }

    void attend(const HeadKeys &keys, const Rows &rows, const Positions &next) override {
        gathered_.clear(rows.count(), step_);
        const int64_t size = keys.places.piece();
        const int64_t end = rows.end();
        for (int64_t piece = rows.oldest(rows.first_position) / size; piece * size < end; ++piece) {
            const bool is_last = (piece + 1) * size >= end;
            attend_piece(keys, rows, piece, is_last ? next : first_of(keys, rows, piece + 1));
            merge(gathered_, piece_, rows.count(), step_);
        }
    }

    void attend_piece(const HeadKeys &of, const Rows &rows, int64_t piece, const Positions &next) override {
        const Keys<KV> keys = typed(of);
        const int64_t count = rows.count();
        piece_.clear(count, step_);
        const int64_t size = of.places.piece();
        const int64_t begin = std::max(piece * size, rows.oldest(rows.first_position));
        const int64_t end = std::min((piece + 1) * size, rows.end());
        for (int64_t start = begin / kKeys * kKeys; start < end; start += kKeys) {
            const int64_t known = std::min(kKeys, end - start);
            runs_.find(keys, start, known);
            if (start + kKeys < end)
                runs_.look_ahead(keys, start + kKeys, std::min(kKeys, end - start - kKeys));
            else
                runs_.look_ahead(typed(next.keys), next.start, next.count);
            runs_.score(queries_.get(), count, scores_.get());
            soften(rows, start, runs_.width());
            runs_.mix(weights_.get(), count, known, piece_.mixed, step_);
        }
    }

  private:
    static Keys<KV> typed(const HeadKeys &keys) { return {{*keys.layer, keys.places}, keys.head, keys.table}; }

    // Turns scores into weights, 0 for positions that a row must not see, and scales what it has
    // gathered, so that its highest score has the weight 1.
    void soften(const Rows &rows, int64_t start, int64_t width) {
        const float scale = 1.0f / std::sqrt(float(dim_));
        for (int64_t row = 0; row < rows.count(); ++row) {
            const int64_t position = rows.first_position + row / rows.group;
            const int64_t begin = std::max<int64_t>(rows.oldest(position) - start, 0);
            const int64_t end = std::min(width, rows.reach(row / rows.group) - start);
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

    const int64_t dim_, rows_;
    Runs runs_;
    std::unique_ptr<X[]> queries_, weights_;
    std::unique_ptr<Stored[]> stored_;  // a key and a value
    std::unique_ptr<float[]> scores_, memory_;
};

}  // namespace

#if defined(PENSTOCK_CODED_KV)
using Runs = CodedRuns;
std::string kv_products() { return code_instructions(); }
#else
using Runs = PlainRuns<PENSTOCK_WEIGHTS>;
std::string kv_products() { return {}; }
#endif

std::unique_ptr<Attention> make_attention(int64_t max_rows, int64_t head_dim, int64_t value_dim) {
    return std::make_unique<AttentionTo<Runs>>(max_rows, head_dim, value_dim);
}
