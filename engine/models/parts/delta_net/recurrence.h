// Layers with a gated delta net: all between their projections, token by token.
//
// A sequence's state in a layer is a matrix for each value head, and what the convolution has yet to read. Every token
// is computed by the same operations in the same order, so the bits of a state do not depend on how its tokens are
// divided into steps.
//
// Source: Yang et al. 2024, gated delta networks (arXiv:2412.06464); the layer is Qwen3.5's.
#pragma once
#include <algorithm>
#include <cmath>

#include "native/step/rows.h"
#include "native/step/structs.h"

namespace {

// Tokens [first, end) of a step. They begin with the state `source`, with zeros where that is -1, and their
// state is written to `target`, or nowhere where that is -1.
struct StateSegment {
    int64_t first, end, source, target;
};

inline void silu(float *x, int64_t count) {  // count: of whole vectors
    for (int64_t i = 0; i < count; i += kLanes) {
        const Floats v = load(x + i);
        store(x + i, v / (1.0f + exp(-v)));
    }
}

inline int64_t whole_vectors(int64_t count) { return (count + kLanes - 1) / kLanes * kLanes; }

// Divides by the length, and multiplies by scale.
inline void to_length(float *x, int64_t count, float scale) {
    const float factor = scale / std::sqrt(mean_square(x, count) * float(count) + 1e-6f);
    for (int64_t i = 0; i < count; ++i) x[i] *= factor;
}

// Some columns of a matrix, as wide as V vectors or, where that is 0, one number: what they become by one
// token, and what its query reads of them.
template <int V>
inline void advance(float *matrix, int64_t row_step, int64_t rows, const float *query, const float *key, float decay,
             float beta, const float *value, float *out) {
    if constexpr (V == 0) {
        float known = 0, read = 0;
        for (int64_t i = 0; i < rows; ++i) known += key[i] * matrix[i * row_step];
        const float added = beta * (*value - decay * known);
        for (int64_t i = 0; i < rows; ++i) {
            matrix[i * row_step] = decay * matrix[i * row_step] + key[i] * added;
            read += query[i] * matrix[i * row_step];
        }
        *out = read;
    } else {
        Floats known[V] = {}, added[V], read[V] = {};
        for (int64_t i = 0; i < rows; ++i) {
            const Floats k = all(key[i]);
#pragma GCC unroll 4
            for (int u = 0; u < V; ++u)
                known[u] = fused(k, load(matrix + i * row_step + u * kLanes), known[u]);
        }
#pragma GCC unroll 4
        for (int u = 0; u < V; ++u) added[u] = beta * (load(value + u * kLanes) - decay * known[u]);
        for (int64_t i = 0; i < rows; ++i) {
            const Floats k = all(key[i]), q = all(query[i]);
            float *row = matrix + i * row_step;
#pragma GCC unroll 4
            for (int u = 0; u < V; ++u) {
                const Floats x = fused(k, added[u], decay * load(row + u * kLanes));
                store(row + u * kLanes, x);
                read[u] = fused(q, x, read[u]);
            }
        }
#pragma GCC unroll 4
        for (int u = 0; u < V; ++u) store(out + u * kLanes, read[u]);
    }
}

// One key head of one sequence, and the value heads that it serves. As it computes all tokens of a step for them, no two
// share a state.
class DeltaNetHead {
  public:
    // has_drafts: whether a state may be written nowhere.
    static int64_t floats(const DeltaNetLayer &net, bool has_drafts) {
        return own_floats(net) + (has_drafts ? served(net) * net.key_dim * net.value_dim : 0);
    }

    // memory: of so many floats.
    DeltaNetHead(const DeltaNetLayer &net, int64_t key_head, float eps, float *memory)
        : net_(net), eps_(eps), keys_(net.key_dim), values_(served(net) * net.value_dim), width_(width(net)),
          all_values_(net.num_value_heads * net.value_dim), channels_(2 * net.num_key_heads * keys_ + all_values_),
          first_head_(key_head * served(net)),
          parts_{{key_head * keys_, keys_, 0},
                 {(net.num_key_heads + key_head) * keys_, keys_, whole_vectors(keys_)},
                 {2 * net.num_key_heads * keys_ + key_head * values_, values_, 2 * whole_vectors(keys_)}},
          window_(memory), mixed_(window_ + net.num_taps * width_), gate_(mixed_ + width_),
          out_(gate_ + whole_vectors(net.value_dim)), lost_(memory + own_floats(net)) {
        std::fill_n(memory, own_floats(net), 0.0f);
    }

    // projected: of each token what the layer's projections give, so many floats apart. put(token, column, values)
    // takes what a value head gives.
    template <class Put> void run(const StateSegment &segment, const float *projected, int64_t step, Put put) {
        begin(segment);
        for (int64_t token = segment.first; token < segment.end; ++token) {
            const float *row = projected + token * step;
            convolve(row);
            for (int64_t head = first_head_; head < first_head_ + served(net_); ++head) {
                run(row, head, segment.target);
                put(token, head * net_.value_dim, out_);
            }
        }
        if (segment.target >= 0) copy_inputs(segment.target, true);
    }

  private:
    // Of the channels that it computes, those of queries, of keys or of values.
    struct Part {
        int64_t from, count, to;  // among all channels, and among its own
    };

    static int64_t own_floats(const DeltaNetLayer &net) {
        return (net.num_taps + 1) * width(net) + 2 * whole_vectors(net.value_dim);
    }
    static int64_t served(const DeltaNetLayer &net) { return net.num_value_heads / net.num_key_heads; }
    static int64_t width(const DeltaNetLayer &net) {  // of what it computes of a token
        return 2 * whole_vectors(net.key_dim) + whole_vectors(served(net) * net.value_dim);
    }

    float *matrix(int64_t state, int64_t head) const {
        if (state < 0) return lost_ + (head - first_head_) * net_.key_dim * net_.value_dim;
        return net_.matrices + (state * net_.num_value_heads + head) * net_.key_dim * net_.value_dim;
    }

    void begin(const StateSegment &segment) {
        const int64_t size = net_.key_dim * net_.value_dim;
        for (int64_t head = first_head_; head < first_head_ + served(net_); ++head) {
            float *to = matrix(segment.target, head);
            if (segment.source < 0) std::fill_n(to, size, 0.0f);
            else if (segment.source != segment.target) std::copy_n(matrix(segment.source, head), size, to);
        }
        std::fill_n(window_, net_.num_taps * width_, 0.0f);
        if (segment.source >= 0) copy_inputs(segment.source, false);
    }

    // Between a state and all of the window but its last row.
    void copy_inputs(int64_t state, bool to_state) {
        for (int64_t tap = 0; tap + 1 < net_.num_taps; ++tap)
            for (const Part &part : parts_) {
                float *of_state = net_.inputs + (state * (net_.num_taps - 1) + tap) * channels_ + part.from;
                float *own = window_ + tap * width_ + part.to;
                if (to_state) std::copy_n(own, part.count, of_state);
                else std::copy_n(of_state, part.count, own);
            }
    }

    // Queries, keys and values of a token, to mixed_.
    void convolve(const float *projected) {
        float *last = window_ + (net_.num_taps - 1) * width_;
        for (const Part &part : parts_) {
            std::copy_n(projected + part.from, part.count, last + part.to);
            float *out = mixed_ + part.to;
            std::fill_n(out, part.count, 0.0f);
            for (int64_t tap = 0; tap < net_.num_taps; ++tap) {
                const float *x = window_ + tap * width_ + part.to;
                const float *weights = net_.taps + tap * channels_ + part.from;
                for (int64_t i = 0; i < part.count; ++i) out[i] += weights[i] * x[i];
            }
        }
        std::copy_n(window_ + width_, (net_.num_taps - 1) * width_, window_);
        silu(mixed_, width_);
        to_length(mixed_, keys_, 1.0f / std::sqrt(float(keys_)));
        to_length(mixed_ + parts_[1].to, keys_, 1.0f);
    }

    // To out_. The output gates follow the convolution's inputs, then beta of each value head, and what its decay is
    // made of.
    void run(const float *projected, int64_t head, int64_t state) {
        const float *gates = projected + channels_ + all_values_, *keys = mixed_ + parts_[1].to;
        const float x = gates[net_.num_value_heads + head] + net_.bias[head];
        const float decay = std::exp(net_.decay[head] * (x > 20.0f ? x : std::log1p(std::exp(x))));
        const float beta = 1.0f / (1.0f + std::exp(-gates[head]));
        const int64_t columns = net_.value_dim;
        const float *value = mixed_ + parts_[2].to + (head - first_head_) * columns;
        float *s = matrix(state, head);
        int64_t j = 0;
        for (; j + 4 * kLanes <= columns; j += 4 * kLanes)
            advance<4>(s + j, columns, keys_, mixed_, keys, decay, beta, value + j, out_ + j);
        for (; j + kLanes <= columns; j += kLanes)
            advance<1>(s + j, columns, keys_, mixed_, keys, decay, beta, value + j, out_ + j);
        for (; j < columns; ++j) advance<0>(s + j, columns, keys_, mixed_, keys, decay, beta, value + j, out_ + j);

        std::copy_n(projected + channels_ + head * columns, columns, gate_);
        silu(gate_, whole_vectors(columns));
        multiply_by(out_, net_.norm, columns, mean_square(out_, columns), eps_, out_);
        for (j = 0; j < columns; ++j) out_[j] *= gate_[j];
    }

    const DeltaNetLayer &net_;
    const float eps_;
    const int64_t keys_, values_, width_, all_values_, channels_, first_head_;
    const Part parts_[3];
    float *const window_, *const mixed_, *const gate_, *const out_, *const lost_;
};

}  // namespace
