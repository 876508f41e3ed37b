// The inputs that layers have of their own.
#pragma once
#include <cmath>

#include "native/step/context.h"

namespace {

class PerLayerInputPhases : PartPhases {
  public:
    explicit PerLayerInputPhases(StepContext &context)
        : PartPhases(context), step_(m_.num_layers * m_.inputs.size) {
        if (m_.inputs.size) inputs_ = state_.workspace.inputs.reserve(s_.tokens * step_);
    }

    // Those of all layers, of the embedded tokens, which are not normalised for it.
    KEEP_APART void make(StepThread &thread) {
        const PerLayerInputs &all = m_.inputs;
        linears_.multiply_normalised(thread, nullptr, &all.projection, 1, {0, kNoStack},
                                     [&](int64_t t, int64_t n, const float *y, int64_t count) {
                                         float *to = inputs_ + t * step_ + n;
                                         for (int64_t i = 0; i < count; ++i) to[i] = y[i] * float(all.scale);
                                     });
        thread.run(s_.tokens, [&](int64_t t) {
            const float *rows = s_.input_rows + t * step_;
            float *inputs = inputs_ + t * step_;
            for (int64_t l = 0; l < m_.num_layers; ++l) {
                float *input = inputs + l * all.size;
                norms_.normalise(input, all.norm, all.size, input);
            }
            for (int64_t i = 0; i < step_; ++i) inputs[i] = (inputs[i] + rows[i]) * std::sqrt(0.5f);
            go_on(t);
        });
    }

    // Adds what a layer makes of its own, which every rank does.
    void add(StepThread &thread, int64_t index) {
        const Layer &layer = m_.layers[index];
        gate(thread, index);
        linears_.multiply_active(thread, layer.input.projection, {index, kNoStack});
        norms_.add_normed(thread, layer.input.norm, float(layer.scalar));
    }

  private:
    // activation(gate) * input, of the residual stream's gate.
    KEEP_APART void gate(StepThread &thread, int64_t index) {
        const PerLayerInput &own = m_.layers[index].input;
        linears_.multiply_normalised(
            thread, nullptr, &own.gate, 1, {index, kNoStack}, [&](int64_t t, int64_t n, const float *y, int64_t count) {
                const float *input = inputs_ + t * step_ + index * m_.inputs.size + n;
                linears_.put_active(own.projection, y, input, 0, 1, count, t, n);
            });
    }
    // The residual stream that follows, once the inputs are made of what was embedded.
    void go_on(int64_t t) {
        float *residual = state_.residual_of(t);
        if (s_.sent) std::copy_n(residual, m_.hidden, s_.sent + (s_.tokens + t) * m_.hidden);
        if (s_.received) std::copy_n(s_.received + t * m_.hidden, m_.hidden, residual);
    }

    const int64_t step_;       // between tokens
    float *inputs_ = nullptr;  // of each token, those of all layers
};

}  // namespace
