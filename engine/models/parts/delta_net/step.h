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
        const bool are_apart = is_coded(net.projections[0]) || is_coded(net.projections[2]);
        project(thread, index, 0, are_apart ? 2 : 4);
        if (are_apart) project(thread, index, 2, 2);
        thread.run(s_.sequences * net.num_key_heads, [&](int64_t unit) {
            recur(thread.worker, index, unit / net.num_key_heads, unit % net.num_key_heads);
        });
        linears_.multiply_and_add(thread, net.output, {state_.x, state_.x_step}, state_.mixed, state_.attended_size,
                                  {index, kOutput});
    }

    // accepted: of each sequence, how many of its drafts are right. Their tokens are computed again, from what the
    // projections gave, as a step without drafts would have.
    KEEP_APART void accept(StepThread &thread, int64_t index, const int64_t *accepted) {
        const DeltaNetLayer &net = m_.layers[index].delta_net;
        thread.run(s_.sequences * net.num_key_heads, [&](int64_t unit) {
            const int64_t sequence = unit / net.num_key_heads, first = s_.draft_starts[sequence];
            if (!accepted[sequence]) return;
            DeltaNetHead head = head_of(thread.worker, net, unit % net.num_key_heads);
            const int64_t num_certain = num_tokens(sequence) - state_.num_drafts(sequence);
            go_on(head, net, sequence, {first, first + accepted[sequence], own_state(net, sequence), num_certain},
                  state_.drafted_of(index), false);
        });
    }

  private:
    // Tokens from `first` to before `end`, of a sequence whose row has so many before them. They begin with the state
    // `source`, as a segment does.
    struct Tokens {
        int64_t first, end, source, num_before;
    };

    // The layer's projections from number `first` on, so many.
    void project(StepThread &thread, int64_t index, int first, int count) {
        const Layer &layer = m_.layers[index];
        const Linear *all = layer.delta_net.projections;
        const int64_t column = first ? all[0].rows + all[1].rows : 0;
        linears_.multiply_normalised(thread, layer.input_norm, all + first, count, {index, kQkv, first},
                                     [&](int64_t t, int64_t n, const float *y, int64_t columns) {
                                         std::copy_n(y, columns, state_.wide + t * state_.qkv_size + column + n);
                                     });
    }

    // All tokens of a sequence. Its drafts change no state, and what they are made of is kept.
    void recur(Worker &worker, int64_t index, int64_t sequence, int64_t key_head) {
        const DeltaNetLayer &net = m_.layers[index].delta_net;
        const int64_t begin = s_.query_starts[sequence], end = s_.query_starts[sequence + 1];
        if (begin == end) return;
        const int64_t drafts = state_.num_drafts(sequence), own = own_state(net, sequence);
        DeltaNetHead head = head_of(worker, net, key_head);
        go_on(head, net, sequence, {begin, end - drafts, s_.positions[begin] ? own : -1, 0}, state_.wide, true);
        if (!drafts) return;
        run(head, net, {end - drafts, end, own, -1}, state_.wide, true);
        if (key_head == 0)
            std::copy_n(state_.wide + (end - drafts) * state_.qkv_size, drafts * state_.qkv_size,
                        state_.drafted_of(index) + s_.draft_starts[sequence] * state_.qkv_size);
    }
    // Up to each snapshot of the sequence's state, which the next tokens go on from, and then to its own.
    void go_on(DeltaNetHead &head, const DeltaNetLayer &net, int64_t sequence, const Tokens &tokens,
               const float *projected, bool puts) {
        StateSegment segment{tokens.first, tokens.first, -1, tokens.source};
        const auto until = [&](int64_t end, int64_t target) {
            segment = {segment.end, end, segment.target, target};
            run(head, net, segment, projected, puts);
        };
        for (int64_t i = 0; i < s_.num_snapshots; ++i) {
            const int64_t *row = s_.snapshots + 3 * i, end = tokens.first + row[1] - tokens.num_before;
            if (row[0] == sequence && end > tokens.first && end <= tokens.end) until(end, row[2]);
        }
        until(tokens.end, own_state(net, sequence));
    }
    // puts: whether anything reads what the layer gives for these tokens.
    KEEP_APART void run(DeltaNetHead &head, const DeltaNetLayer &net, const StateSegment &segment, const float *projected,
                        bool puts) {
        head.run(segment, projected, state_.qkv_size, [&](int64_t t, int64_t n, const float *values) {
            if (puts) put(net, t, n, values);
        });
    }
    DeltaNetHead head_of(Worker &worker, const DeltaNetLayer &net, int64_t key_head) const {
        const int64_t floats = DeltaNetHead::floats(net, s_.draft_starts != nullptr);
        return {net, key_head, float(m_.eps), worker.recurrence.reserve(floats)};
    }
    int64_t own_state(const DeltaNetLayer &net, int64_t sequence) const {
        return s_.block_tables[(net.group * s_.sequences + sequence) * s_.max_blocks];
    }
    int64_t num_tokens(int64_t sequence) const { return s_.query_starts[sequence + 1] - s_.query_starts[sequence]; }
    // Some columns of what the output projection reads.
    void put(const DeltaNetLayer &net, int64_t t, int64_t n, const float *values) {
        if (is_coded(net.output))
            std::copy_n(values, net.value_dim, state_.mixed + t * state_.attended_size + n);
        else
            divide_to_x(values, 1.0f, net.value_dim, state_.x + t * state_.x_step + n * kActivationBytes);
    }
};

}  // namespace
