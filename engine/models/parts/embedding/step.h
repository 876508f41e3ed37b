// The residual stream before the first layer.
#pragma once
#include "native/step/context.h"

namespace {

class EmbeddingPhases : PartPhases {
  public:
    using PartPhases::PartPhases;

    // Where layers have inputs of their own, the residual stream is what was embedded, of which these are made.
    void run(StepThread &thread) {
        thread.run(s_.tokens, [&](int64_t t) {
            if (!s_.received) return embed(t);
            const int64_t row = (m_.inputs.size ? s_.tokens : 0) + t;
            std::copy_n(s_.received + row * m_.hidden, m_.hidden, state_.residual_of(t));
        });
        if (!s_.received) sums_.add(thread, -1, state_.residual, s_.tokens * m_.hidden);
    }

  private:
    KEEP_APART void embed(int64_t t) {
        const Embedding &embedding = m_.embedding;
        const int64_t id = s_.token_ids[t] - m_.ranks.first_id;
        float *out = state_.residual_of(t);
        if (m_.ranks.group && (id < 0 || id >= embedding.rows)) {  // another rank has it
            std::fill_n(out, m_.hidden, 0.0f);
            return;
        }
        embed_row(embedding.table, id, m_.hidden, embedding.is_in_bands, float(embedding.multiplier), out);
    }
};

}  // namespace
