// Gated delta nets, between their two products.
#pragma once
#include "native/step/context.h"
#include "recurrence.h"

namespace {

class DeltaNetPhases : PartPhases {
  public:
    using PartPhases::PartPhases;

    KEEP_APART void run(StepThread &thread, int64_t index) {
        const Layer &layer = m_.layers[index];
        const DeltaNetLayer &net = layer.delta_net;
        const Linear *inputs = net.projections, *gates = inputs + 2;
        const bool is_apart = is_coded(*inputs) || is_coded(*gates);
        project(thread, layer, inputs, is_apart ? 2 : 3, 0);
        if (is_apart) project(thread, layer, gates, 1, inputs[0].rows + inputs[1].rows);
        thread.run(s_.sequences * net.num_key_heads, [&](int64_t unit) {
            recur(thread.worker, net, unit / net.num_key_heads, unit % net.num_key_heads);
        });
        linears_.multiply_and_add(thread, net.output, {state_.x, state_.x_step}, state_.mixed, state_.attended_size,
                                  {index, kNoStack});
    }

  private:
    // column: where the first of these layers writes.
    void project(StepThread &thread, const Layer &layer, const Linear *layers, int count, int64_t column) {
        linears_.multiply_normalised(thread, layer.input_norm, layers, count, {0, kNoStack},
                                     [&](int64_t t, int64_t n, const float *y, int64_t columns) {
                                         std::copy_n(y, columns, state_.wide + t * state_.qkv_size + column + n);
                                     });
    }

    // All tokens of a sequence, up to each snapshot of its state, which the next go on from.
    void recur(Worker &worker, const DeltaNetLayer &net, int64_t sequence, int64_t key_head) {
        const int64_t begin = s_.query_starts[sequence], end = s_.query_starts[sequence + 1];
        if (begin == end) return;
        DeltaNetHead head(net, key_head, float(m_.eps), worker.recurrence.reserve(DeltaNetHead::floats(net)));
        const int64_t own = s_.block_tables[(net.group * s_.sequences + sequence) * s_.max_blocks];
        StateSegment segment{begin, begin, -1, s_.positions[begin] ? own : -1};
        const auto go_on = [&](int64_t until, int64_t target) {
            segment = {segment.end, until, segment.target, target};
            head.run(segment, state_.wide, state_.qkv_size,
                     [&](int64_t t, int64_t n, const float *values) { put(net, t, n, values); });
        };
        for (int64_t i = 0; i < s_.num_snapshots; ++i)
            if (const int64_t *row = s_.snapshots + 3 * i; row[0] == sequence) go_on(begin + row[1], row[2]);
        go_on(end, own);
    }
    // Some columns of what the output projection reads.
    void put(const DeltaNetLayer &net, int64_t t, int64_t n, const float *values) {
        if (is_coded(net.output))
            std::copy_n(values, net.value_dim, state_.mixed + t * state_.attended_size + n);
        else
            divide_to_x(values, 1.0f, net.value_dim, state_.x + t * state_.x_step + n * kActivationBytes);
    }
};

}  // namespace
