// Sums over all ranks.
#pragma once
#include "state.h"

namespace {

// Numbers that one thread sums over all ranks, where there are enough for several.
constexpr int64_t kSlice = 16384;

class RankSums {
  public:
    explicit RankSums(StepState &state) : state_(state), ranks_(state.model.ranks) {}

    // Sums over all ranks, and calls use(first, end) for the numbers between them. How many units of work there are
    // must be the same on all ranks, whose threads may be of another number.
    template <class Use>
    void add(StepThread &thread, int64_t layer, float *data, int64_t count, Use use) const {
        if (!ranks_.group) return;
        std::atomic<int64_t> &failed = state_.workspace.failed;
        const int64_t units = std::clamp<int64_t>(count / kSlice, 1, kRankLanes);
        thread.run(units, [&](int64_t unit) {
            const int64_t first = count * unit / units, end = count * (unit + 1) / units;
            if (!failed.load(std::memory_order_relaxed)) {
                const int64_t outcome = ranks_.all_reduce(ranks_.group, unit, data + first, end - first,
                                                          state_.step.timeout_ns);
                int64_t none = 0;
                if (outcome) failed.compare_exchange_strong(none, 256 * (layer + 1) + outcome);
            }
            use(first, end);
        });
    }
    void add(StepThread &thread, int64_t layer, float *data, int64_t count) const {
        add(thread, layer, data, count, [](int64_t, int64_t) {});
    }

  private:
    StepState &state_;
    const Ranks &ranks_;
};

}  // namespace
