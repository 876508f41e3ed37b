// Attention to latents: what keys, and queries of these, are made of, and values of what is attended to.
#pragma once
#include "models/parts/attention/step.h"
#include "native/step/context.h"

namespace {

class LatentPhases : PartPhases {
  public:
    LatentPhases(StepContext &context, AttentionPhases &attention)
        : PartPhases(context), attention_(attention), of_(m_.latents) {
        if (of_.query_rank) queries_ = state_.workspace.queries.reserve(s_.tokens * queries_size());
    }

    void run(StepThread &thread, int64_t index) {
        const Layer &layer = m_.layers[index];
        const Linear &output = layer.attention.output;
        attention_.multiply_qkv(thread, index);
        if (of_.query_rank) multiply_queries(thread, layer.latent);
        thread.run(s_.tokens, [&](int64_t t) { split(thread.worker, layer, t); });
        const Input plain{state_.x, state_.x_step};
        multiply_heads(thread, layer.latent.to_latents, plain, of_.nope_dim * kActivationBytes,
                       [&](int64_t t, int64_t head, int64_t n, const float *y, int64_t count) {
                           std::copy_n(y, count, attention_.latents(t, head) + n);
                       });
        attention_.attend(thread, layer.attention);
        const int64_t head_bytes = (of_.latent_dim + of_.rope_dim) * sizeof(float);
        const Input attended{reinterpret_cast<unsigned char *>(attention_.latents(0, 0)),
                             attention_.latents_step() * int64_t(sizeof(float))};
        multiply_heads(thread, layer.latent.to_values, attended, head_bytes,
                       [&](int64_t t, int64_t head, int64_t n, const float *y, int64_t count) {
                           const int64_t column = head * of_.value_dim + n;
                           if (is_coded(output))
                               std::copy_n(y, count, state_.mixed + t * state_.attended_size + column);
                           else
                               divide_to_x(y, 1.0f, count, row_of_x(t) + column * kActivationBytes);
                       });
        linears_.multiply_and_add(thread, output, {state_.x, state_.x_step}, state_.mixed, state_.attended_size,
                                  {index, kOutput});
    }

  private:
    int64_t queries_size() const { return m_.heads * (of_.nope_dim + of_.rope_dim); }
    unsigned char *row_of_x(int64_t t) const { return state_.x + t * state_.x_step; }
    const float *projected(int64_t t) const { return state_.wide + t * state_.qkv_size; }

    // The queries of all heads, of what the first product gives.
    KEEP_APART void multiply_queries(StepThread &thread, const LatentLayer &layer) {
        const Linear &query = layer.query;
        const auto multiply = [&](Source source) {
            linears_.multiply_all(thread, &query, 1, source, s_.tokens, {0, kNoStack},
                                  [&](int64_t t, int64_t n, const float *y, int64_t count) {
                                      std::copy_n(y, count, queries_ + t * queries_size() + n);
                                  });
        };
        const int64_t size = of_.query_rank;
        const float eps = float(of_.norm_eps);
        if (is_coded(query)) {
            const auto value = [&](int64_t t) {
                float *row = thread.worker.row.get();
                normalise(projected(t), layer.query_norm, size, eps, row);
                return row;
            };
            return linears_.with_codes(thread, query, s_.tokens, value, multiply);
        }
        thread.run(s_.tokens, [&](int64_t t) {
            normalise_to_x(projected(t), layer.query_norm, size, eps, row_of_x(t));
        });
        multiply([&] { return Input{state_.x, state_.x_step}; });
    }

    // Stores a token's key. Of its queries, what is rotated goes to where heads attend with it, and the rest to a
    // row of X.
    KEEP_APART void split(Worker &worker, const Layer &layer, int64_t t) {
        const AttentionLayer &attention = layer.attention;
        const int64_t angles = s_.positions[t] * attention.angles_step;
        const Rotation by{attention.cos + angles, attention.sin + angles, of_.rope_dim / 2, 1.0f};
        const float *latent = projected(t) + (of_.query_rank ? of_.query_rank : queries_size());
        float *key = worker.head.get();
        normalise(latent, layer.latent.latent_norm, of_.latent_dim, float(of_.norm_eps), key);
        rotate_shared(latent + of_.latent_dim, by, key + of_.latent_dim);
        attention_.store_latent(worker, attention, t, key);
        const float *query = of_.query_rank ? queries_ + t * queries_size() : projected(t);
        unsigned char *x = row_of_x(t);
        for (int64_t head = 0; head < m_.heads; ++head) {
            divide_to_x(query, 1.0f, of_.nope_dim, x);
            rotate_shared(query + of_.nope_dim, by, attention_.latents(t, head) + of_.latent_dim);
            query += of_.nope_dim + of_.rope_dim;
            x += of_.nope_dim * kActivationBytes;
        }
    }
    void rotate_shared(const float *from, const Rotation &by, float *to) const {
        of_.is_interleaved ? rotate_neighbours(from, by, to) : rotate(from, of_.rope_dim, by, to);
    }

    // Products of each head's part of rows of X with a matrix of its own.
    template <class Put>
    KEEP_APART void multiply_heads(StepThread &thread, const Linear *heads, const Input &rows, int64_t head_bytes,
                                   Put put) {
        const int64_t bands = banded_rows(heads->rows) / kBand;
        linears_.for_bands(thread, m_.heads * bands, s_.tokens, [&](int64_t first, int64_t tokens, int64_t band) {
            const int64_t head = band / bands, n = band % bands * kBand;
            float *c = thread.worker.products.get();
            linears_.multiply(heads[head], {rows.x + head * head_bytes, rows.step}, first, tokens, band % bands, c);
            const int64_t columns = std::min(kBand, heads->rows - n);
            for (int64_t t = 0; t < tokens; ++t) put(first + t, head, n, c + t * kBand, columns);
        });
    }

    AttentionPhases &attention_;
    const Latents &of_;
    float *queries_ = nullptr;
};

}  // namespace
