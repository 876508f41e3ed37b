// From logits to ids, as engine/sampling/sampler.py describes it and draws where this is not compiled: some
// sixty of torch's operators there, which are most of a small model's step.
#pragma once
#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "native/products/vectors.h"

struct Draw {
    int64_t rows, size;
    const float *logits;             // (rows, size)
    const int64_t *slots, *lengths;  // (rows): the position that is drawn; a row of slot -1 is left out
    // Of each slot; the rest as in Sampler.assign, where an inverse temperature of 0 takes the likeliest.
    const int64_t *seeds, *top_k;
    const float *inverse_temperatures, *top_p, *log_min_p;
    int64_t *ids;                    // (rows)
};

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// The first of a row's maxima; -1 where one of its numbers is NaN or +inf.
inline int64_t likeliest(const float *row, int64_t size) {
    constexpr int64_t kBlock = 64 * kLanes;
    float best = -kInfinity;
    int64_t first = 0;
    for (int64_t start = 0; start < size; start += kBlock) {
        const int64_t end = std::min(start + kBlock, size);
        Floats highest = all(-kInfinity);
        Words are_finite = ~Words{};
        int64_t i = start;
        for (; i + kLanes <= end; i += kLanes) {
            const Floats x = load(row + i);
            are_finite &= (Words)(x < all(kInfinity));
            highest = x > highest ? x : highest;
        }
        float top = -kInfinity;
        for (int64_t lane = 0; lane < kLanes; ++lane) {
            if (!are_finite[lane]) return -1;
            top = std::max(top, highest[lane]);
        }
        for (; i < end; ++i) {
            if (!(row[i] < kInfinity)) return -1;
            top = std::max(top, row[i]);
        }
        if (top > best) best = top, first = start;
    }
    while (row[first] != best) ++first;
    return first;
}

// One of the indices in proportion to its weight, never of weight 0. Sums of integers are exact in any order.
inline int64_t pick(const float *weights, int64_t count, double uniform) {
    const double scale = 0x1p38 / *std::max_element(weights, weights + count);
    int64_t total = 0, reached = 0, i = 0;
    for (int64_t j = 0; j < count; ++j) total += int64_t(weights[j] * scale);
    const int64_t target = int64_t(uniform * double(total));
    while ((reached += int64_t(weights[i] * scale)) <= target) ++i;
    return i;
}

// SplitMix64's output number n after the state `key`, in [0, 1).
inline double uniform(std::uint64_t key, std::uint64_t n) {
    std::uint64_t z = key + n * 0x9E3779B97F4A7C15;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;
    z = (z ^ z >> 27) * 0x94D049BB133111EB;
    z ^= z >> 31;
    return double(z >> 11) * 0x1p-53;
}

// Draws one id of one row.
class RowDraw {
  public:
    RowDraw(const Draw &draw, int64_t row)
        : draw_(draw), slot_(draw.slots[row]), position_(std::uint64_t(draw.lengths[row])),
          logits_(draw.logits + row * draw.size), num_blocks_((draw.size + kBlock - 1) / kBlock),
          size_(num_blocks_ * kBlock), factor_(draw.inverse_temperatures[slot_]) {}

    int64_t id() {
        const int64_t best = likeliest(logits_, draw_.size);
        if (factor_ == 0 || best < 0 || logits_[best] == -kInfinity) return best;
        peak_ = logits_[best];
        // Kept: page faults of new memory take longer than what is written to it.
        static thread_local std::vector<float> memory;
        if (int64_t(memory.size()) < size_ + num_blocks_) memory.resize(std::size_t(size_ + num_blocks_));
        weights_ = memory.data(), sums_ = weights_ + size_;
        weigh();
        const auto key = std::uint64_t(draw_.seeds[slot_]);
        const int64_t block = pick(sums_, num_blocks_, uniform(key, 2 * position_ + 1)) * kBlock;
        return block + pick(weights_ + block, kBlock, uniform(key, 2 * position_ + 2));
    }

  private:
    static constexpr int64_t kBlock = 64;
    static constexpr std::uint32_t kOne = 0x3f800000, kInfinite = 0x7f800000;  // of floats, the bits

    // The weights of all ids, 0 of those that a filter excludes, and the sums of their blocks.
    void weigh() {
        // Further below the likeliest, a block's sum is none beside that one's.
        float farthest = std::min(87.0f, -draw_.log_min_p[slot_]);
        if (const int64_t k = draw_.top_k[slot_]) {
            each_block([](Floats distance) { return (Floats)(kInfinite - (Words)distance); });
            const std::uint32_t kth = edge(kInfinite, double(k), [](Words) { return all(1); });
            farthest = std::min(farthest, std::bit_cast<float>(kInfinite - kth));
        }
        each_block([=](Floats distance) { return distance <= all(farthest) ? exp(-distance) : Floats{}; });
        const float share = draw_.top_p[slot_];
        if (share >= 1) return;
        double mass = 0;
        for (int64_t block = 0; block < num_blocks_; ++block) mass += sums_[block];
        const std::uint32_t last = edge(kOne, share * mass, [](Words bits) { return (Floats)bits; });
        const Floats least = all(std::bit_cast<float>(last));
        const auto kept = [=](const float *w) { return load(w) >= least ? load(w) : Floats{}; };
        for (int64_t block = 0; block < num_blocks_; ++block) put_block(block, weights_ + block * kBlock, kept);
    }

    // make(distances below the peak, by the temperature), of every id; infinite past the last.
    template <class Make> void each_block(Make make) {
        const auto made = [&](const float *x) { return make((all(peak_) - load(x)) * all(factor_)); };
        const int64_t whole = draw_.size / kBlock;
        for (int64_t block = 0; block < whole; ++block) put_block(block, logits_ + block * kBlock, made);
        if (whole == num_blocks_) return;
        float rest[kBlock];
        std::fill_n(std::copy(logits_ + whole * kBlock, logits_ + draw_.size, rest), size_ - draw_.size, -kInfinity);
        put_block(whole, rest, made);
    }

    template <class Make> void put_block(int64_t block, const float *from, Make make) {
        Floats total{};
        for (int64_t i = 0; i < kBlock; i += kLanes) {
            const Floats made = make(from + i);
            store(weights_ + block * kBlock + i, made);
            total += made;
        }
        sums_[block] = sum(total);
    }

    // The largest number t, up to `high`, such that the values of those that are t or more sum to `wanted`. The
    // numbers are the bits of the weights. It is sought in several places at once, as one pass costs what memory does.
    template <class Value> std::uint32_t edge(std::uint32_t high, double wanted, Value value) const {
        constexpr int kPlaces = 4;
        constexpr int64_t kChunk = 16 * kBlock;  // sums of more are not left to float32
        std::uint32_t low = 0;
        for (++high; high - low > 1;) {
            std::uint32_t places[kPlaces];
            const std::uint32_t step = std::max(1u, (high - low) / (kPlaces + 1));
            for (int p = 0; p < kPlaces; ++p) places[p] = std::min(low + (p + 1) * step, high - 1);
            double sums[kPlaces] = {};
            for (int64_t start = 0; start < size_; start += kChunk) {
                Floats parts[kPlaces] = {};
                for (int64_t i = start; i < std::min(start + kChunk, size_); i += kLanes) {
                    const Words bits = (Words)load(weights_ + i);
                    for (int p = 0; p < kPlaces; ++p) parts[p] += bits >= places[p] ? value(bits) : Floats{};
                }
                for (int p = 0; p < kPlaces; ++p) sums[p] += sum(parts[p]);
            }
            for (int p = 0; p < kPlaces; ++p) {
                if (sums[p] < wanted) {
                    high = std::min(high, places[p]);
                    break;
                }
                low = places[p];
            }
        }
        return low;
    }

    const Draw &draw_;
    const int64_t slot_;
    const std::uint64_t position_;
    const float *logits_;
    const int64_t num_blocks_, size_;
    const float factor_;
    float peak_ = 0, *weights_ = nullptr, *sums_ = nullptr;
};

}  // namespace
