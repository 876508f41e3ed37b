// LoRA adapters add to what linear layers give.
#pragma once
#include "low_rank.h"
#include "state.h"

namespace {

// Linear layers that read the same input: which changes of an AdapterLayer are theirs.
struct Stack {
    int64_t first, count;
};
constexpr Stack kQkv{0, 5}, kOutput{5, 1}, kGateUp{6, 2}, kDown{8, 1}, kNoStack{9, 0};

struct Place {  // of a stack of linear layers, or of those from number `first` on, where others were multiplied before
    int64_t layer;
    Stack stack;
    int64_t first = 0;
};

class Adapters {
  public:
    explicit Adapters(StepState &state) : s_(state.step), num_threads_(state.workspace.team.size()) {
        if (!any()) return;
        low_ = state.workspace.low.reserve(s_.tokens * s_.width);
        for (int64_t i = 0; i < s_.num_runs; ++i) {
            const AdapterRun &run = s_.runs[i];
            for (int64_t t = 0; t < run.tokens; t += kLowRankTokens)
                adapted_.push_back({run.first + t, std::min(kLowRankTokens, run.tokens - t), run.layers});
        }
    }

    bool any() const { return s_.num_runs; }

    // low_ = A x of the tokens that have an adapter. read(t, out) gives x, of so many columns.
    template <class Read>
    KEEP_APART void shrink(StepThread &thread, Place place, int64_t columns, Read read) {
        if (!any() || !place.stack.count || place.first) return;
        const int64_t step = low_rank_columns(columns), tiles = int64_t(adapted_.size());
        // Few tiles are split, by ranks, so that every thread has some.
        const int64_t each = tiles < 2 * num_threads_ ? 8 : s_.width;
        const int64_t blocks = (s_.width + each - 1) / each;
        const Stack stack = place.stack;
        thread.run(tiles * blocks, [&](int64_t unit) {
            const AdapterRun &tile = adapted_[unit / blocks];
            const int64_t begin = unit % blocks * each;
            float *rows = nullptr;
            int64_t at = 0;  // of this change's in low_
            for (int64_t i = stack.first; i < stack.first + stack.count; ++i) {
                const LowRank &change = tile.layers[place.layer].changes[i];
                // In whole packs: the unit that has a pack's first row has all of them.
                const int64_t from = packed_rows(std::max<int64_t>(begin - at, 0));
                const int64_t to = std::min(packed_rows(begin + each - at), change.rank);
                if (from < to) {
                    if (!rows) rows = input(thread.worker, tile, columns, step, read);
                    shrink_by(rows, tile.tokens, change.down, from, to, step,
                              low_ + tile.first * s_.width + at, s_.width);
                }
                at += change.rank;
            }
        });
    }

    // c, of one band of a place's layer `linear` and some tokens, += what their adapters add.
    KEEP_APART void add(Place place, int64_t linear, int64_t band, int64_t first, int64_t tokens, float *c) {
        for (int64_t i = 0; i < s_.num_runs; ++i) {
            const AdapterRun &run = s_.runs[i];
            const int64_t from = std::max(first, run.first);
            const int64_t to = std::min(first + tokens, run.first + run.tokens);
            if (from >= to) continue;
            int64_t at = 0;
            const Stack stack = place.stack;
            for (int64_t j = stack.first; j < stack.first + stack.count; ++j) {
                const LowRank &change = run.layers[place.layer].changes[j];
                const int64_t own_band = band - change.first;
                if (change.linear == place.first + linear && own_band >= 0 && own_band < change.bands) {
                    for (int64_t t = from; t < to; ++t)
                        add_low_rank_band(low_ + t * s_.width + at, change.up, own_band, change.rank,
                                          float(change.scale), c + (t - first) * kBand);
                }
                at += change.rank;
            }
        }
    }

  private:
    static int64_t packed_rows(int64_t rows) {
        return (std::max<int64_t>(rows, 0) + kLowRankRows - 1) / kLowRankRows * kLowRankRows;
    }
    template <class Read>
    float *input(Worker &worker, const AdapterRun &tile, int64_t columns, int64_t step, Read read) {
        float *rows = worker.adapted.reserve(kLowRankTokens * step);
        for (int64_t t = 0; t < tile.tokens; ++t) {
            read(tile.first + t, rows + t * step);
            std::fill(rows + t * step + columns, rows + (t + 1) * step, 0.0f);
        }
        return rows;
    }

    const Step &s_;
    const int64_t num_threads_;
    float *low_ = nullptr;             // A x of each token that has an adapter, change after change
    std::vector<AdapterRun> adapted_;  // those tokens, a few at a time
};

}  // namespace
