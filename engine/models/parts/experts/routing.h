// Which experts compute which tokens of a layer, as `routes` of layer.py chooses them, and their rows, sorted by
// expert: so each expert's weights are read once, for all of its tokens.
#pragma once
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "native/step/structs.h"

// Rows of one expert that are computed together.
struct Segment {
    int64_t expert, first, count;
};

// A row is one token at one of its experts; they are sorted by expert, and those of one expert by token. A
// token's own result depends on no other: its experts come in the same order, whatever lies between them.
class Routing {
  public:
    void reserve(int64_t tokens, const Experts &settings, int64_t most_rows) {
        settings_ = settings, tokens_ = tokens, most_rows_ = most_rows;
        experts_ = settings.num_experts, each_ = settings.num_per_token;
        logits_.resize(tokens * experts_);
        choices_.resize(tokens * experts_);
        groups_.resize(tokens * settings.num_groups);
        chosen_.resize(tokens * each_);
        weights_.resize(tokens * each_);
        token_of_.resize(tokens * each_);
        weight_of_.resize(tokens * each_);
        num_read_ = 0;
    }

    float *logits(int64_t token) { return logits_.data() + token * experts_; }
    static float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

    // From the token's logits; for factors and corrections see ExpertsLayer. The last token to choose sorts the rows.
    void choose(int64_t token, const float *factors, const float *corrections) {
        const float *logits = this->logits(token), peak = *std::max_element(logits, logits + experts_);
        const float *choices = logits;
        if (settings_.has_sigmoids || settings_.num_groups > 1) {
            float *own = choices_.data() + token * experts_;
            for (int64_t expert = 0; expert < experts_; ++expert)
                own[expert] = weight(logits[expert], peak) + (corrections ? corrections[expert] : 0);
            if (settings_.num_groups > 1) keep_best_groups(own, groups_.data() + token * settings_.num_groups);
            choices = own;
        }
        int64_t *chosen = chosen_.data() + token * each_, count = 0;
        for (int64_t expert = 0; expert < experts_; ++expert) {
            if (count == each_ && !(choices[expert] > choices[chosen[count - 1]])) continue;
            int64_t at = count < each_ ? count++ : count - 1;
            // Behind those that are as likely: of equal ones the first counts as higher.
            for (; at > 0 && choices[expert] > choices[chosen[at - 1]]; --at) chosen[at] = chosen[at - 1];
            chosen[at] = expert;
        }
        float *weights = weights_.data() + token * each_, sum = 0;
        for (int64_t i = 0; i < each_; ++i) weights[i] = weight(logits[chosen[i]], peak);
        if (settings_.is_normed)
            for (int64_t i = 0; i < each_; ++i) sum += weights[i];
        else if (!settings_.has_sigmoids)
            for (int64_t expert = 0; expert < experts_; ++expert) sum += weight(logits[expert], peak);
        else
            sum = 1;
        const float factor = float(settings_.weight_factor);
        for (int64_t i = 0; i < each_; ++i) weights[i] = weights[i] / (sum + kLeastSum) * factor;
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
    // Of a softmax before it is divided by the sum.
    float weight(float logit, float peak) const {
        return settings_.has_sigmoids ? sigmoid(logit) : std::exp(logit - peak);
    }

    // Makes the choices of other groups less than any. totals: of each group's best experts.
    void keep_best_groups(float *choices, float *totals) const {
        const float least = -std::numeric_limits<float>::infinity();
        const int64_t groups = settings_.num_groups, size = experts_ / groups;
        for (int64_t group = 0; group < groups; ++group) {
            float best = least, second = least;
            for (int64_t i = group * size; i < (group + 1) * size; ++i) {
                second = std::max(second, std::min(best, choices[i]));
                best = std::max(best, choices[i]);
            }
            totals[group] = settings_.num_best == 2 ? best + second : best;
        }
        for (int64_t group = 0; group < groups; ++group) {
            int64_t num_better = 0;
            for (int64_t other = 0; other < groups; ++other)
                num_better += totals[other] > totals[group] || (totals[other] == totals[group] && other < group);
            if (num_better >= settings_.num_groups_used)
                std::fill_n(choices + group * size, size, least);
        }
    }

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

    static constexpr float kLeastSum = 1e-20f;  // see LEAST_SUM of config.py

    Experts settings_ = {};
    int64_t tokens_ = 0, experts_ = 0, each_ = 0, most_rows_ = 0, num_read_ = 0;
    std::atomic<int64_t> num_chosen_{0};
    std::vector<float> logits_, choices_, groups_, weights_, weight_of_;
    std::vector<int64_t> chosen_, token_of_, starts_;
    std::vector<Segment> segments_;
};
