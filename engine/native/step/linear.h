// Linear layers: what they read, and their products in bands.
#pragma once
#include "adapters.h"
#include "models/parts/norm/step.h"

namespace {

struct Input {  // what a product reads: rows of x, or codes of them
    const unsigned char *x;
    int64_t step;  // in bytes
    CodedRows coded = {};
};

// Gives it when it is first needed. It refers to what it is made from, and hides its type, so that the
// functions that take one are compiled once.
class Source {
  public:
    template <class Make>
    Source(const Make &make)
        : make_(&make), call_([](const void *it) { return (*static_cast<const Make *>(it))(); }) {}
    Input operator()() const { return call_(make_); }

  private:
    const void *make_;
    Input (*call_)(const void *);
};

class LinearLayers {
  public:
    LinearLayers(StepState &state, Norms &norms, Adapters &adapters)
        : state_(state), m_(state.model), s_(state.step), norms_(norms), adapters_(adapters) {}

    // Calls work(first token, tokens, band) for all of them, in units of work.
    template <class Work> void for_bands(StepThread &thread, int64_t bands, int64_t tokens, Work work) {
        const int64_t wanted = 8 * state_.workspace.team.size();
        int64_t chunk = kChunk;
        while (chunk > 48 && bands * ((tokens + chunk - 1) / chunk) < wanted) chunk /= 2;
        const int64_t chunks = (tokens + chunk - 1) / chunk;
        const int64_t size = std::clamp<int64_t>(bands * chunks / wanted, 1, 8);
        thread.run((bands + size - 1) / size * chunks, [&](int64_t unit) {
            const int64_t first = unit % chunks * chunk, begin = unit / chunks * size;
            for (int64_t band = begin; band < std::min(begin + size, bands); ++band)
                work(first, std::min(chunk, tokens - first), band);
        });
    }

    // c = x W^T + b for one band, and some tokens.
    KEEP_APART static void multiply(const Linear &linear, const Input &in, int64_t first, int64_t tokens,
                                    int64_t band, float *c) {
        const unsigned char *x = in.x + first * in.step;
        if (is_coded(linear))
            formats[linear.format].multiply_codes(in.coded, first, tokens, linear, band, c, kBand);
        else if (linear.format)
            formats[linear.format].multiply_rows(x, in.step, tokens, linear, band, c, kBand);
        else
            multiply_plain(x, in.step, tokens, linear.weight, band, linear.columns, c, kBand);
        if (linear.bias)
            add_bias(linear.bias, band, std::min(kBand, linear.rows - band * kBand), tokens, c, kBand);
    }

    // Layers that are stacked: they read the same input. source() gives it when it is first needed.
    // put(token, column, results, how many) takes results.
    template <class Put>
    KEEP_APART void multiply_all(StepThread &thread, const Linear *layers, int count, Source source,
                                 int64_t tokens, Place place, Put put) {
        int64_t bands = 0;
        for (int i = 0; i < count; ++i) bands += banded_rows(layers[i].rows) / kBand;
        for_bands(thread, bands, tokens, [&](int64_t first, int64_t num_tokens, int64_t band) {
            const Linear *layer = layers;
            int64_t column = 0;
            for (; band >= banded_rows(layer->rows) / kBand; ++layer) {
                band -= banded_rows(layer->rows) / kBand;
                column += layer->rows;
            }
            float *c = thread.worker.products.get();
            multiply(*layer, source(), first, num_tokens, band, c);
            if (adapters_.any()) adapters_.add(place, layer - layers, band, first, num_tokens, c);
            const int64_t columns = std::min(kBand, layer->rows - band * kBand);
            for (int64_t t = 0; t < num_tokens; ++t)
                put(first + t, column + band * kBand, c + t * kBand, columns);
        });
    }

    // Calls use(source) with the codes of rows, each of which value(t) gives in float32.
    template <class Value, class Use>
    void with_codes(StepThread &thread, const Linear &linear, int64_t rows, Value value, Use use) {
        const int64_t columns = linear.columns, group = linear.group;
        const int64_t bytes = CodedRows::bytes(columns, group);
        if (rows * columns <= kFew) {  // each thread does it for itself
            bool is_done = false;
            use([&] {
                unsigned char *memory = thread.worker.coded.reserve((rows + kSpare) * bytes);
                for (int64_t t = 0; t < rows && !is_done; ++t)
                    code(thread.worker, linear, value(t), memory + t * bytes);
                is_done = true;
                return Input{nullptr, 0, CodedRows::at(memory, columns, group)};
            });
            return;
        }
        thread.run(rows, [&](int64_t t) { code(thread.worker, linear, value(t), state_.coded + t * bytes); });
        use([&] { return Input{nullptr, 0, CodedRows::at(state_.coded, columns, group)}; });
    }

    // Calls use(source) with a source of the normalised residual stream of all tokens, as `linear` reads it.
    template <class Use>
    void with_normalised(StepThread &thread, const float *norm, const Linear &linear, Use use) {
        Worker &worker = thread.worker;
        if (is_coded(linear)) {
            const auto value = [&](int64_t t) {
                norms_.normalise(state_.residual_of(t), norm, worker.row.get());
                return worker.row.get();
            };
            return with_codes(thread, linear, s_.tokens, value, use);
        }
        if (s_.tokens * m_.hidden <= kFew) {
            bool is_done = false;
            use([&] {
                unsigned char *x = worker.normalised.reserve(0);
                for (int64_t t = 0; t < s_.tokens && !is_done; ++t) norms_.normalise_to(x, t, norm);
                is_done = true;
                return Input{x, state_.x_step};
            });
            return;
        }
        thread.run(s_.tokens, [&](int64_t t) { norms_.normalise_to(state_.x, t, norm); });
        use([&] { return Input{state_.x, state_.x_step}; });
    }

    // Layers that are stacked and read the normalised residual stream: see multiply_all.
    template <class Put>
    void multiply_normalised(StepThread &thread, const float *norm, const Linear *layers, int count, Place place,
                             Put put) {
        shrink_normalised(thread, norm, place);
        with_normalised(thread, norm, layers[0], [&](Source source) {
            multiply_all(thread, layers, count, source, s_.tokens, place, put);
        });
    }
    void shrink_normalised(StepThread &thread, const float *norm, Place place) {
        adapters_.shrink(thread, place, m_.hidden, [&](int64_t t, float *out) {
            norms_.normalise(state_.residual_of(t), norm, out);
        });
    }
    // A layer that reads rows of X or, where it is coded, of floats, and adds to the residual stream.
    void multiply_and_add(StepThread &thread, const Linear &linear, Input rows, const float *floats, int64_t step,
                          Place place) {
        const auto value = [&](int64_t t) { return floats + t * step; };
        adapters_.shrink(thread, place, linear.columns, [&](int64_t t, float *out) {
            if (is_coded(linear)) return void(std::copy_n(value(t), linear.columns, out));
            widen_x(rows.x + t * rows.step, linear.columns, out);
        });
        const auto use = [&](Source source) {
            multiply_all(thread, &linear, 1, source, s_.tokens, place,
                         [&](int64_t t, int64_t n, const float *y, int64_t count) { state_.add(t, n, y, count); });
        };
        if (is_coded(linear)) return with_codes(thread, linear, s_.tokens, value, use);
        use([&] { return rows; });
    }
    // One that reads what put_active has written.
    void multiply_active(StepThread &thread, const Linear &linear, Place place) {
        multiply_and_add(thread, linear, {state_.mlp, state_.mlp_step}, state_.active, m_.mlp, place);
    }
    // activation(gate) * up of an MLP, by the thread that computed both. weights: of each token's, or null.
    KEEP_APART void gate(StepThread &thread, const MlpLayer &mlp, Source source, Place place,
                         const float *weights = nullptr) {
        for_bands(thread, banded_rows(mlp.size) / kBand, s_.tokens, [&](int64_t first, int64_t count, int64_t band) {
            const Input in = source();
            float *gate = thread.worker.products.get(), *up = gate + kChunk * kBand;
            multiply(mlp.gate, in, first, count, band, gate);
            if (mlp.up.rows) multiply(mlp.up, in, first, count, band, up);
            else std::fill_n(up, count * kBand, 1.0f);  // there is one product, of which this is the function
            if (adapters_.any()) {
                adapters_.add(place, 0, band, first, count, gate);
                if (mlp.up.rows) adapters_.add(place, 1, band, first, count, up);
            }
            for (int64_t i = 0; weights && i < count * kBand; ++i) up[i] *= weights[first + i / kBand];
            const int64_t columns = std::min(kBand, mlp.size - band * kBand);
            put_active(mlp.down, gate, up, kBand, count, columns, first, band * kBand);
        });
    }
    // activation(gate) * up, where `next` reads it: some columns of tokens, from n and t on.
    KEEP_APART void put_active(const Linear &next, const float *gate, const float *up, int64_t in_step,
                               int64_t tokens, int64_t columns, int64_t t, int64_t n) {
        if (is_coded(next))
            activate(activation_, gate, up, in_step, tokens, columns, state_.active + t * m_.mlp + n, m_.mlp);
        else
            activate_to_x(activation_, gate, up, in_step, tokens, columns,
                          state_.mlp + t * state_.mlp_step + n * kActivationBytes, state_.mlp_step);
    }

    static void code(Worker &worker, const Linear &linear, const float *row, unsigned char *codes) {
        if (linear.order) {
            float *ordered = worker.ordered.reserve(linear.columns);
            for (int64_t k = 0; k < linear.columns; ++k) ordered[k] = row[linear.order[k]];
            row = ordered;
        }
        code_row(row, linear.columns, linear.group, codes);
    }

  private:
    StepState &state_;
    const Model &m_;
    const Step &s_;
    Norms &norms_;
    Adapters &adapters_;
    const Activation activation_{m_.gelu, 0, 0};
};

}  // namespace
