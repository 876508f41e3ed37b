// Layers with a gated delta net: all between their projections, token by token.
//
// A sequence's state in a layer is a matrix for each value head, and what the convolution has yet to read.
// One unit of work is a key head of a sequence, with the value heads that it serves; it computes all tokens
// of the step for them, so no two units share a state. Every token is computed by the same operations in the
// same order, so the bits of a state do not depend on how its tokens are divided into steps.
//
// Source: Yang et al. 2024, gated delta networks (arXiv:2412.06464); the layer is Qwen3.5's.
#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "native/step/team.h"
#include "native/products/vectors.h"

namespace {

// Tokens [first, end) of a step. They begin with the state `source`, with zeros where that is -1, and their
// state is written to `target`.
struct Segment {
    int64_t first, end, source, target;
};

struct DeltaNet {
    int64_t key_heads, value_heads, key_dim, value_dim, num_taps;
    double eps;
    const float *taps;   // (num_taps, channels): of queries, keys and values
    const float *decay;  // of each value head: -exp(A_log)
    const float *bias;   // of each value head
    const float *norm;   // (value_dim)
    int64_t sequences;
    const Segment *segments;
    const int64_t *first_segments;  // of each sequence, and where they end
    const float *projected;         // (tokens, channels + values): the convolution's inputs, then output gates
    const float *gates;             // (tokens, 2 * value_heads): beta, then decay
    float *matrices;                // (states, value_heads, key_dim, value_dim)
    float *inputs;                  // (states, num_taps - 1, channels)
    float *out;                     // (tokens, values)
};

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

void silu(float *x, int64_t count) {  // count: of whole vectors
    for (int64_t i = 0; i < count; i += kLanes) {
        const Floats v = load(x + i);
        store(x + i, v / (1.0f + exp(-v)));
    }
}

int64_t whole_vectors(int64_t count) { return (count + kLanes - 1) / kLanes * kLanes; }

float sum_of_squares(const float *x, int64_t count) {
    Floats squares = {};
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) squares = fused(load(x + i), load(x + i), squares);
    float total = sum(squares);
    for (; i < count; ++i) total += x[i] * x[i];
    return total;
}

// Divides by the length, and multiplies by scale.
void normalize(float *x, int64_t count, float scale) {
    const float factor = scale / std::sqrt(sum_of_squares(x, count) + 1e-6f);
    for (int64_t i = 0; i < count; ++i) x[i] *= factor;
}

// Some columns of a matrix, as wide as V vectors or, where that is 0, one number: what they become by one
// token, and what its query reads of them.
template <int V>
void advance(float *matrix, int64_t row_step, int64_t rows, const float *query, const float *key, float decay,
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

// One key head of one sequence, and the value heads that it serves.
class Head {
  public:
    Head(const DeltaNet &net, int64_t key_head)
        : net_(net), keys_(net.key_dim), values_(net.value_heads / net.key_heads * net.value_dim),
          channels_(2 * net.key_heads * net.key_dim + net.value_heads * net.value_dim),
          first_head_(key_head * (net.value_heads / net.key_heads)),
          last_head_(first_head_ + net.value_heads / net.key_heads),
          parts_{{key_head * keys_, keys_, 0},
                 {(net.key_heads + key_head) * keys_, keys_, whole_vectors(keys_)},
                 {2 * net.key_heads * keys_ + key_head * values_, values_, 2 * whole_vectors(keys_)}},
          width_(2 * whole_vectors(keys_) + whole_vectors(values_)),
          window_(net.num_taps * width_), mixed_(width_), gate_(whole_vectors(net.value_dim)) {}

    void run(const Segment &segment) {
        begin(segment);
        for (int64_t token = segment.first; token < segment.end; ++token) {
            convolve(token);
            const float *keys = mixed_.data() + parts_[1].to;
            for (int64_t head = first_head_; head < last_head_; ++head) run(token, head, keys, segment.target);
        }
        end(segment);
    }

  private:
    // Of the channels that it computes, those of queries, of keys or of values.
    struct Part {
        int64_t from, count, to;  // among all channels, and among its own
    };

    float *matrix(int64_t state, int64_t head) const {
        return net_.matrices + (state * net_.value_heads + head) * net_.key_dim * net_.value_dim;
    }

    void begin(const Segment &segment) {
        const int64_t size = net_.key_dim * net_.value_dim;
        for (int64_t head = first_head_; head < last_head_; ++head) {
            float *to = matrix(segment.target, head);
            if (segment.source < 0) std::fill_n(to, size, 0.0f);
            else if (segment.source != segment.target) std::copy_n(matrix(segment.source, head), size, to);
        }
        std::fill(window_.begin(), window_.end(), 0.0f);
        if (segment.source >= 0) copy_inputs(segment.source, false);
    }
    void end(const Segment &segment) { copy_inputs(segment.target, true); }

    // Between a state and all of the window but its last row.
    void copy_inputs(int64_t state, bool to_state) {
        for (int64_t tap = 0; tap + 1 < net_.num_taps; ++tap)
            for (const Part &part : parts_) {
                float *of_state = net_.inputs + (state * (net_.num_taps - 1) + tap) * channels_ + part.from;
                float *own = window_.data() + tap * width_ + part.to;
                if (to_state) std::copy_n(own, part.count, of_state);
                else std::copy_n(of_state, part.count, own);
            }
    }

    // Queries, keys and values of a token, to mixed_.
    void convolve(int64_t token) {
        const float *projected = net_.projected + token * (channels_ + net_.value_heads * net_.value_dim);
        float *last = window_.data() + (net_.num_taps - 1) * width_;
        for (const Part &part : parts_) {
            std::copy_n(projected + part.from, part.count, last + part.to);
            float *out = mixed_.data() + part.to;
            std::fill_n(out, part.count, 0.0f);
            for (int64_t tap = 0; tap < net_.num_taps; ++tap) {
                const float *x = window_.data() + tap * width_ + part.to;
                const float *weights = net_.taps + tap * channels_ + part.from;
                for (int64_t i = 0; i < part.count; ++i) out[i] += weights[i] * x[i];
            }
        }
        std::copy(window_.begin() + width_, window_.end(), window_.begin());
        silu(mixed_.data(), width_);
        normalize(mixed_.data(), keys_, 1.0f / std::sqrt(float(keys_)));
        normalize(mixed_.data() + parts_[1].to, keys_, 1.0f);
    }

    void run(int64_t token, int64_t head, const float *keys, int64_t state) {
        const int64_t columns = net_.value_dim, all_values = net_.value_heads * columns;
        const float *gates = net_.gates + token * 2 * net_.value_heads;
        const float x = gates[net_.value_heads + head] + net_.bias[head];
        const float decay = std::exp(net_.decay[head] * (x > 20.0f ? x : std::log1p(std::exp(x))));
        const float beta = sigmoid(gates[head]);
        const float *value = mixed_.data() + parts_[2].to + (head - first_head_) * columns;
        float *out = net_.out + token * all_values + head * columns, *s = matrix(state, head);
        int64_t j = 0;
        for (; j + 4 * kLanes <= columns; j += 4 * kLanes)
            advance<4>(s + j, columns, keys_, mixed_.data(), keys, decay, beta, value + j, out + j);
        for (; j + kLanes <= columns; j += kLanes)
            advance<1>(s + j, columns, keys_, mixed_.data(), keys, decay, beta, value + j, out + j);
        for (; j < columns; ++j)
            advance<0>(s + j, columns, keys_, mixed_.data(), keys, decay, beta, value + j, out + j);

        std::copy_n(net_.projected + token * (channels_ + all_values) + channels_ + head * columns, columns,
                    gate_.data());
        silu(gate_.data(), int64_t(gate_.size()));
        const float mean = sum_of_squares(out, columns) / float(columns);
        const float factor = 1.0f / std::sqrt(mean + float(net_.eps));
        for (j = 0; j < columns; ++j) out[j] = out[j] * factor * net_.norm[j] * gate_[j];
    }

    const DeltaNet &net_;
    const int64_t keys_, values_, channels_, first_head_, last_head_;
    const Part parts_[3];
    const int64_t width_;
    std::vector<float> window_, mixed_, gate_;
};

class DeltaNetJob : public Job {
  public:
    DeltaNetJob(const DeltaNet &net, int64_t threads) : net_(net), phases_(1, threads) {}
    void run(int thread) override {
        phases_.first()->run(thread, net_.sequences * net_.key_heads, [this](int64_t unit) {
            const int64_t sequence = unit / net_.key_heads;
            Head head(net_, unit % net_.key_heads);
            for (int64_t i = net_.first_segments[sequence]; i < net_.first_segments[sequence + 1]; ++i)
                head.run(net_.segments[i]);
        });
    }

  private:
    const DeltaNet net_;
    Phases phases_;
};

}  // namespace

extern "C" Team *penstock_delta_net_team(int64_t threads) { return new Team(int(threads)); }
extern "C" void penstock_delta_net_end(Team *team) { delete team; }
extern "C" void penstock_delta_net(Team *team, const DeltaNet *net) {
    team->run(std::make_shared<DeltaNetJob>(*net, team->size()));
}
