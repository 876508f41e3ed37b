// Norms of the residual stream, and what is added to it.
#pragma once
#include "native/step/sums.h"

namespace {

class Norms {
  public:
    Norms(StepState &state, RankSums &sums) : state_(state), m_(state.model), sums_(sums) {}

    void normalise(const float *in, const float *scale, float *out) { normalise(in, scale, m_.hidden, out); }
    KEEP_APART void normalise(const float *in, const float *scale, int64_t size, float *out) {
        ::normalise(in, scale, size, kind_, out);
    }
    // A row of X of the residual stream.
    void normalise_to(unsigned char *x, int64_t t, const float *norm) {
        normalise_to_x(state_.residual_of(t), norm, m_.hidden, kind_, x + t * state_.x_step);
    }

    // Where something comes between a product and the residual stream: adds what that makes of the product, of
    // all ranks' products together. scalar: what the sum is multiplied by, after a norm.
    void add_change(StepThread &thread, int64_t layer, const float *norm, float scalar = 1.0f) {
        if (!state_.change) return;
        const int64_t count = state_.step.tokens * m_.hidden;
        sums_.add(thread, layer, state_.change, count, [&](int64_t first, int64_t end) {
            if (norm) return;
            for (int64_t i = first; i < end; ++i) state_.residual[i] += state_.change[i];
        });
        if (norm) add_normed(thread, norm, scalar);
    }
    void add_normed(StepThread &thread, const float *norm, float scalar) {
        thread.run(state_.step.tokens, [&](int64_t t) {
            float *change = state_.change + t * m_.hidden, *to = state_.residual_of(t);
            normalise(change, norm, change);
            for (int64_t i = 0; i < m_.hidden; ++i) to[i] = (to[i] + change[i]) * scalar;
        });
    }
    // Where there is a norm of the residual stream itself.
    void normalise_sums(StepThread &thread, const float *norm) {
        if (!norm) return;
        thread.run(state_.step.tokens, [&](int64_t t) {
            float *sum = state_.residual_of(t);
            normalise(sum, norm, sum);
        });
    }

  private:
    StepState &state_;
    const Model &m_;
    RankSums &sums_;
    const NormKind kind_{float(m_.eps), m_.is_centred != 0};
};

}  // namespace
