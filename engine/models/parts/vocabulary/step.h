// The residual stream before the first layer, and after the last one the final norm and the output layer, or what the
// next stage gets instead.
#pragma once
#include <cmath>

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

    // Adds to tokens with inserted rows what these have for a layer.
    KEEP_APART void deepen(StepThread &thread, int64_t layer) {
        thread.run(s_.tokens, [&](int64_t t) {
            if (s_.insert_of[t] < 0) return;
            const float *from = s_.deepstack + (layer * s_.inserts + s_.insert_of[t]) * m_.hidden;
            float *to = state_.residual_of(t);
            for (int64_t i = 0; i < m_.hidden; ++i) to[i] += from[i];
        });
    }

    // Of a head that drafts: what its layer reads, from the embedded tokens.
    KEEP_APART void merge(StepThread &thread) {
        const Merge &merge = m_.merge;
        const auto *states = static_cast<const unsigned char *>(s_.merged);
        thread.run(s_.tokens, [&](int64_t t) {
            float *row = thread.worker.recurrence.reserve(3 * m_.hidden), *state = row + m_.hidden;
            widen_state(states + t * m_.hidden * kWeightBytes, m_.hidden, state + m_.hidden);
            norms_.normalise(state_.residual_of(t), merge.embedded_norm, row);
            norms_.normalise(state + m_.hidden, merge.state_norm, state);
            divide_to_x(row, 1.0f, 2 * m_.hidden, state_.x + t * state_.x_step);
        });
        linears_.multiply_all(thread, &merge.fc, 1, [&] { return Input{state_.x, state_.x_step}; }, s_.tokens,
                              {0, kNoStack}, [&](int64_t t, int64_t n, const float *y, int64_t count) {
                                  std::copy_n(y, count, state_.residual_of(t) + n);
                              });
    }

  private:
    KEEP_APART void embed(int64_t t) {
        const Embedding &embedding = m_.embedding;
        const int64_t id = s_.token_ids[t] - m_.ranks.first_id;
        float *out = state_.residual_of(t);
        if (s_.insert_of && s_.insert_of[t] >= 0) {  // of one rank, as all are added up
            const float *row = s_.inserted + s_.insert_of[t] * m_.hidden;
            m_.ranks.first_id ? std::fill_n(out, m_.hidden, 0.0f) : std::copy_n(row, m_.hidden, out);
            return;
        }
        if (m_.ranks.group && (id < 0 || id >= embedding.rows)) {  // another rank has it
            std::fill_n(out, m_.hidden, 0.0f);
            return;
        }
        embed_row(embedding.table, id, m_.hidden, embedding.is_in_bands, float(embedding.multiplier), out);
    }
};

class HeadPhases : PartPhases {
  public:
    using PartPhases::PartPhases;

    void send(StepThread &thread) {  // the next stage computes on
        thread.run(s_.tokens, [&](int64_t t) {
            std::copy_n(state_.residual_of(t), m_.hidden, s_.sent + t * m_.hidden);
        });
    }
    void put_states(StepThread &thread) {
        thread.run(s_.samples, [&](int64_t i) { normalise(i, state(i)); });
    }
    void put_all_states(StepThread &thread) {
        thread.run(s_.tokens, [&](int64_t t) {
            normalise_token(t, static_cast<unsigned char *>(s_.all_states) + t * m_.hidden * kWeightBytes);
        });
    }
    // has_states: whether they are given, and not made of the residual stream.
    void put_logits(StepThread &thread, bool has_states) {
        const Linear &output = m_.head.linear;
        Worker &worker = thread.worker;
        // As states, also where X is wider, so that the logits are the same if Python has those between.
        const auto state_of = [&](int64_t i) -> const unsigned char * {
            if (has_states) return state(i);
            normalise(i, worker.state.get());
            return worker.state.get();
        };
        const auto multiply = [&](Source source) {
            linears_.multiply_all(thread, &output, 1, source, s_.samples, {0, kNoStack},
                                  [&](int64_t t, int64_t n, const float *y, int64_t count) { put(t, n, y, count); });
        };
        if (is_coded(output)) {
            const auto value = [&](int64_t i) {
                widen_state(state_of(i), m_.hidden, worker.row.get());
                return worker.row.get();
            };
            return linears_.with_codes(thread, output, s_.samples, value, multiply);
        }
        thread.run(s_.samples, [&](int64_t i) {
            copy_state(state_of(i), m_.hidden, state_.x + i * state_.x_step);
        });
        multiply([&] { return Input{state_.x, state_.x_step}; });
    }

  private:
    unsigned char *state(int64_t i) const {
        return static_cast<unsigned char *>(s_.states) + i * m_.hidden * kWeightBytes;
    }
    void normalise(int64_t i, void *state) { normalise_token(s_.sample_rows[i], state); }
    void normalise_token(int64_t t, void *state) {
        normalise_to_state(state_.residual_of(t), m_.head.norm, m_.hidden, {float(m_.eps), m_.is_centred != 0}, state);
    }
    void put(int64_t t, int64_t n, const float *y, int64_t count) const {
        float *to = s_.logits + t * m_.head.linear.rows + n;
        const float multiplier = float(m_.head.multiplier), softcap = float(m_.head.softcap);
        for (int64_t i = 0; i < count; ++i) to[i] = y[i] * multiplier;
        for (int64_t i = 0; softcap && i < count; ++i) to[i] = std::tanh(to[i] / softcap) * softcap;
    }
};

}  // namespace
