// A mixture of experts, alone or beside an MLP.
#pragma once
#include "native/step/context.h"
#include "routing.h"

namespace {

class ExpertsPhases : PartPhases {
  public:
    explicit ExpertsPhases(StepContext &context) : PartPhases(context), routing_(state_.workspace.routing) {
        if (!m_.experts.num_experts) return;
        routing_.reserve(s_.tokens, m_.experts, kChunk);
        shared_.resize(s_.tokens);
        if (state_.change) beside_ = state_.change + s_.tokens * m_.hidden;
    }

    // Adds what each token's experts make of its normalised residual stream to that.
    KEEP_APART void run(StepThread &thread, int64_t index) {
        const ExpertsLayer &layer = m_.layers[index].experts;
        const Linear &gate_of_one = layer.each->gate, &down = layer.each->down;
        const bool is_apart = is_coded(gate_of_one) || layer.input_norm != layer.router_norm;
        linears_.with_normalised(thread, layer.router_norm, layer.router[0], [&](Source source) {
            linears_.multiply_all(thread, layer.router, 2, source, s_.tokens, {0, kNoStack},
                                  [&](int64_t t, int64_t n, const float *y, int64_t count) {
                                      if (n < m_.experts.num_experts)
                                          std::copy_n(y, count, routing_.logits(t) + n);
                                      else
                                          shared_[t] = Routing::sigmoid(*y);
                                  });
            thread.run(s_.tokens, [&](int64_t t) { routing_.choose(t, layer.factors, layer.corrections); });
            if (!is_apart) gate(thread, layer, source);
        });
        if (is_apart)
            linears_.with_normalised(thread, layer.input_norm, gate_of_one,
                                     [&](Source source) { gate(thread, layer, source); });
        if (layer.shared.size) add_shared(thread, layer);
        const auto add_all = [&](Source source) { add(thread, layer, source); };
        if (!is_coded(down)) return add_all([&] { return Input{state_.expert_mlp, state_.expert_step}; });
        const auto value = [&](int64_t row) { return state_.expert_active + row * m_.experts.size; };
        linears_.with_codes(thread, down, state_.expert_rows, value, add_all);
    }

    // The MLP has written to change; adds what the experts make of the residual stream. Ranks have one sum
    // for both.
    KEEP_APART void run_beside_mlp(StepThread &thread, int64_t index) {
        const ExpertsLayer &layer = m_.layers[index].experts;
        thread.run(s_.tokens, [&](int64_t t) {
            std::copy_n(state_.change + t * m_.hidden, m_.hidden, beside_ + t * m_.hidden);
        });
        run(thread, index);
        sums_.add(thread, index, state_.change, 2 * s_.tokens * m_.hidden);
        thread.run(s_.tokens, [&](int64_t t) {
            float *change = state_.change + t * m_.hidden, *of_mlp = beside_ + t * m_.hidden;
            norms_.normalise(of_mlp, layer.mlp_norm, of_mlp);
            norms_.normalise(change, layer.output_norm, change);
            for (int64_t i = 0; i < m_.hidden; ++i) change[i] += of_mlp[i];
        });
    }

  private:
    // activation(gate) * up, a row for each token at each of its experts. How many units of work there are
    // must not depend on the routing, which is another layer's when a thread comes late.
    void gate(StepThread &thread, const ExpertsLayer &layer, Source source) {
        const int64_t bands = banded_rows(m_.experts.size) / kBand;
        const int64_t units = std::min(32 * state_.workspace.team.size(), state_.expert_rows * bands);
        int64_t gathered = -1;
        Input in = {};
        thread.run(units, [&](int64_t unit) {
            const std::vector<Segment> &segments = routing_.segments();
            const int64_t all = int64_t(segments.size()) * bands;
            for (int64_t at = all * unit / units; at < all * (unit + 1) / units; ++at) {
                const Segment &segment = segments[at / bands];
                if (gathered != at / bands) {
                    gathered = at / bands;
                    in = rows_of_segment(thread.worker, source(), segment);
                }
                const Expert &expert = layer.each[segment.expert];
                const int64_t band = at % bands, columns = std::min(kBand, m_.experts.size - band * kBand);
                float *gate = thread.worker.products.get(), *up = gate + kChunk * kBand;
                linears_.multiply(expert.gate, in, 0, segment.count, band, gate);
                linears_.multiply(expert.up, in, 0, segment.count, band, up);
                const int64_t row = segment.first, n = band * kBand;
                if (is_coded(expert.down))
                    activate(activation_, gate, up, kBand, segment.count, columns,
                             state_.expert_active + row * m_.experts.size + n, m_.experts.size);
                else
                    activate_to_x(activation_, gate, up, kBand, segment.count, columns,
                                  state_.expert_mlp + row * state_.expert_step + n * kActivationBytes,
                                  state_.expert_step);
            }
        });
    }
    // Adds what the shared expert gives, before that of the others. They have read the residual stream by now.
    void add_shared(StepThread &thread, const ExpertsLayer &layer) {
        linears_.with_normalised(thread, layer.input_norm, layer.shared.gate, [&](Source source) {
            linears_.gate(thread, layer.shared, source, {0, kNoStack},
                          layer.router[1].rows ? shared_.data() : nullptr);
        });
        linears_.multiply_active(thread, layer.shared.down, {0, kNoStack});
    }
    // Returns what the products of a segment read: its tokens' rows, one after the other.
    Input rows_of_segment(Worker &worker, const Input &all, const Segment &segment) {
        const CodedRows &codes = all.coded;
        if (segment.count == 1) {
            const int64_t t = routing_.token_of(segment.first);
            if (all.x) return {all.x + t * all.step, all.step};
            return {nullptr, 0, {codes.memory + t * codes.step, codes.step, codes.columns, codes.groups}};
        }
        if (all.x) {
            unsigned char *to = worker.gathered.reserve((kChunk + kSpare) * all.step);
            for (int64_t i = 0; i < segment.count; ++i)
                std::copy_n(all.x + routing_.token_of(segment.first + i) * all.step,
                            m_.hidden * kActivationBytes, to + i * all.step);
            return {to, all.step};
        }
        unsigned char *to = worker.gathered.reserve((kChunk + kSpare) * codes.step);
        for (int64_t i = 0; i < segment.count; ++i)
            std::copy_n(codes.memory + routing_.token_of(segment.first + i) * codes.step, codes.step,
                        to + i * codes.step);
        return {nullptr, 0, {to, codes.step, codes.columns, codes.groups}};
    }

    // Adds the experts' outputs to the residual stream. A unit of work has some columns of all experts, so
    // that nobody else adds to them, and a token's experts come in their order.
    void add(StepThread &thread, const ExpertsLayer &layer, Source source) {
        const int64_t bands = banded_rows(m_.hidden) / kBand;
        const int64_t size = std::clamp<int64_t>(bands / (8 * state_.workspace.team.size()), 1, 8);
        thread.run((bands + size - 1) / size, [&](int64_t unit) {
            const Input in = source();
            float *c = thread.worker.products.get();
            const int64_t begin = unit * size * kBand;
            const int64_t width = std::min((unit + 1) * size * kBand, m_.hidden) - begin;
            for (int64_t t = 0; state_.change && !layer.shared.size && t < s_.tokens; ++t)
                std::fill_n(state_.change + t * m_.hidden + begin, width, 0.0f);
            float *all = state_.change ? state_.change : state_.residual;
            for (const Segment &segment : routing_.segments())
                for (int64_t band = unit * size; band < std::min((unit + 1) * size, bands); ++band) {
                    const Linear &down = layer.each[segment.expert].down;
                    linears_.multiply(down, in, segment.first, segment.count, band, c);
                    const int64_t columns = std::min(kBand, m_.hidden - band * kBand);
                    for (int64_t i = 0; i < segment.count; ++i) {
                        const int64_t row = segment.first + i;
                        float *to = all + routing_.token_of(row) * m_.hidden + band * kBand;
                        const float weight = routing_.weight_of(row), *y = c + i * kBand;
                        for (int64_t n = 0; n < columns; ++n) to[n] += weight * y[n];
                    }
                }
        });
    }

    Routing &routing_;
    std::vector<float> shared_;  // the weight of each token's shared expert
    float *beside_ = nullptr;  // what the MLP gives that experts are beside of; it follows change
    const Activation activation_{m_.gelu, float(m_.experts.swiglu_alpha), float(m_.experts.swiglu_limit)};
};

}  // namespace
