// Which experts compute which tokens of a layer, as engine/models/layers/experts.py chooses them, and their
// rows, sorted by expert: so each expert's weights are read once, for all of its tokens.
#pragma once
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <vector>

// Rows of one expert that are computed together.
struct Segment {
    int64_t expert, first, count;
};

// A row is one token at one of its experts; they are sorted by expert, and those of one expert by token. A
// token's own result depends on no other: its experts come in the same order, whatever lies between them.
class Routing {
  public:
    void reserve(int64_t tokens, int64_t experts, int64_t each, int64_t most_rows) {
        tokens_ = tokens, experts_ = experts, each_ = each, most_rows_ = most_rows;
        logits_.resize(tokens * experts);
        chosen_.resize(tokens * each);
        weights_.resize(tokens * each);
        token_of_.resize(tokens * each);
        weight_of_.resize(tokens * each);
        num_read_ = 0;
    }

    float *logits(int64_t token) { return logits_.data() + token * experts_; }

    // From the token's logits. factors: of each expert's weight, or null. The last token to choose sorts the rows.
    void choose(int64_t token, bool is_normed, const float *factors) {
        const float *logits = this->logits(token);
        int64_t *chosen = chosen_.data() + token * each_, count = 0;
        for (int64_t expert = 0; expert < experts_; ++expert) {
            if (count == each_ && !(logits[expert] > logits[chosen[count - 1]])) continue;
            int64_t at = count < each_ ? count++ : count - 1;
            // Behind those that are as likely: of equal ones the first counts as higher.
            for (; at > 0 && logits[expert] > logits[chosen[at - 1]]; --at) chosen[at] = chosen[at - 1];
            chosen[at] = expert;
        }
        const float peak = logits[chosen[0]];
        float *weights = weights_.data() + token * each_, sum = 0;
        for (int64_t i = 0; i < each_; ++i) weights[i] = std::exp(logits[chosen[i]] - peak);
        if (is_normed)
            for (int64_t i = 0; i < each_; ++i) sum += weights[i];
        else
            for (int64_t expert = 0; expert < experts_; ++expert) sum += std::exp(logits[expert] - peak);
        for (int64_t i = 0; i < each_; ++i) weights[i] /= sum;
        for (int64_t i = 0; factors && i < each_; ++i) weights[i] *= factors[chosen[i]];
        if (num_chosen_.fetch_add(1, std::memory_order_acq_rel) + 1 < tokens_) return;
        num_chosen_.store(0, std::memory_order_relaxed);  // for the next layer
        sort();
    }

    const std::vector<Segment> &segments() const { return segments_; }
    int64_t token_of(int64_t row) const { return token_of_[row]; }
    float weight_of(int64_t row) const { return weight_of_[row]; }
    // Experts that have been read since the last call of reserve, over all layers.
    int64_t num_read() const { return num_read_; }

  private:
    void sort() {
        starts_.assign(experts_ + 1, 0);
        for (const int64_t expert : chosen_) ++starts_[expert + 1];
        segments_.clear();
        for (int64_t expert = 0; expert < experts_; ++expert) {
            const int64_t count = starts_[expert + 1], first = starts_[expert];
            starts_[expert + 1] += first;
            num_read_ += count > 0;
            for (int64_t done = 0; done < count; done += most_rows_)
                segments_.push_back({expert, first + done, std::min(most_rows_, count - done)});
        }
        for (int64_t i = 0; i < tokens_ * each_; ++i) {
            const int64_t row = starts_[chosen_[i]]++;
            token_of_[row] = i / each_;
            weight_of_[row] = weights_[i];
        }
    }

    int64_t tokens_ = 0, experts_ = 0, each_ = 0, most_rows_ = 0, num_read_ = 0;
    std::atomic<int64_t> num_chosen_{0};
    std::vector<float> logits_, weights_, weight_of_;
    std::vector<int64_t> chosen_, token_of_, starts_;
    std::vector<Segment> segments_;
};
