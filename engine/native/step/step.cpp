// One step of a Llama-like model on CPU: token ids in, logits out, in a single call.
//
// At batch 1 a step is one pass over the weights, and it is as fast as memory only if nothing comes
// between two matrices: no interpreter, no repacking, no thread that waits long for another. So all
// layers run in one job of a team of threads (team.h), in five phases a layer while tokens are few.
//
// The arithmetic is that of engine/models/llama.py, which runs where this cannot be compiled, and
// which this is tested against. Here the residual stream and all sums are float32. What depends on the types
// of weights, keys and values, and on the formats of codes, is in other sources (weights.h, formats.h): so this
// one, which takes the compiler longest, is compiled once, whatever models are served.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <memory>
#include <new>
#include <vector>

#include "models/parts/experts/routing.h"
#include "native/products/formats.h"
#include "native/products/grouped.h"
#include "inputs.h"
#include "low_rank.h"
#include "rows.h"
#include "structs.h"
#include "team.h"
#include "native/products/vectors.h"
#include "weights.h"

// Of functions that take long beside a call: where each is inlined, the compiler takes twice as long.
#define KEEP_APART __attribute__((noinline))

namespace {

// Tokens of a unit of work: few enough that their activations stay in the L2 cache.
constexpr int64_t kChunk = 192;
// Queries that attend together.
constexpr int64_t kQueries = 96;
// Activations so few that every thread normalises them itself, which takes less time than to wait for
// another.
constexpr int64_t kFew = 8192;
// Numbers that one thread sums over all ranks, where there are enough for several.
constexpr int64_t kSlice = 16384;

// Linear layers that read the same input: which changes of an AdapterLayer are theirs.
struct Stack {
    int64_t first, count;
};
constexpr Stack kQkv{0, 3}, kOutput{3, 1}, kGateUp{4, 2}, kDown{6, 1}, kNoStack{7, 0};

// Memory that grows, and is not initialised. It begins with a cache line, so that rows may do so.
template <class X> class Buffer {
  public:
    X *reserve(int64_t size) {
        if (size > size_)
            memory_.reset(new (std::align_val_t(64)) X[size_ = size + size / 4]);
        return memory_.get();
    }

  private:
    struct Delete {
        void operator()(X *memory) const { operator delete[](memory, std::align_val_t(64)); }
    };
    std::unique_ptr<X[], Delete> memory_;
    int64_t size_ = 0;
};

using Bytes = Buffer<unsigned char>;

// Before any of them enters, which is when the library is loaded.
constinit Format formats[kNumFormats] = {};

// The distance between rows of X, in bytes. Rows a multiple of 4 KiB apart would share few cache lines.
int64_t padded(int64_t columns) { return (columns + 31) / 32 * 32 * kActivationBytes + 64; }

// Whether it reads activations of 8 bits.
bool is_coded(const Linear &linear) { return linear.bits; }

// What lasts from step to step.
struct Runner {
    struct Own {  // of one thread
        int thread;
        std::vector<std::unique_ptr<Attention>> attention;  // of each kind of heads
        Bytes normalised, gathered, coded;
        Buffer<float> adapted;  // what adapters read of some tokens
        std::unique_ptr<float[]> row;  // of x, before it is coded
        std::unique_ptr<float[]> head;
        std::unique_ptr<unsigned char[]> state;
        std::unique_ptr<float[]> products{new float[2 * kChunk * kBand]};
    };

    Runner(const Model &of, int64_t threads) : model(of), team(int(threads)) {
        int64_t widest = 0;
        for (int64_t i = 0; i < model.num_kinds; ++i) widest = std::max(widest, model.kinds[i].head_dim);
        for (int64_t i = 0; i < threads; ++i) {
            std::vector<std::unique_ptr<Attention>> attention;
            for (int64_t j = 0; j < model.num_kinds; ++j) {
                const Heads &heads = model.kinds[j];
                const int64_t rows = std::max(model.heads / heads.kv_heads, kQueries);
                attention.push_back(make_attention(rows, heads.head_dim));
            }
            const int64_t state_bytes = model.hidden * kWeightBytes;
            own.push_back({int(i), std::move(attention), {}, {}, {}, {},
                           std::unique_ptr<float[]>(new float[model.hidden]),
                           std::unique_ptr<float[]>(new float[widest]),
                           std::unique_ptr<unsigned char[]>(new unsigned char[state_bytes])});
        }
    }

    const Model &model;
    std::vector<Own> own;
    Buffer<float> residual, change, wide, parts, mixed, active, low, squares, inputs;
    Bytes x, mlp, coded;
    Routing routing;
    // Of the last step: 0, or 256 times (1 + the layer) where a sum over all ranks failed, plus its outcome. The
    // step then goes on with numbers that mean nothing.
    std::atomic<int64_t> failed{0};
    Team team;  // the last: its threads end before the rest does
};

class Run : public Job {
    using Own = Runner::Own;

  public:
    Run(Runner &runner, const Step &step, bool only_head)
        : runner_(runner), m_(runner.model), s_(step), only_head_(only_head),
          kinds_(m_.kinds, m_.kinds + m_.num_kinds), qkv_(most([&](const Kind &kind) {
              return attended(kind) + 2 * kind.kv_heads * kind.head_dim;
          })),
          attended_(most([&](const Kind &kind) { return attended(kind); })),
          x_step_(padded(std::max(m_.hidden, attended_))), mlp_step_(padded(m_.mlp)),
          expert_step_(padded(m_.expert_mlp)),
          expert_rows_(s_.tokens * m_.experts_each), inputs_step_(m_.num_layers * m_.input_size),
          phases_((13 + (m_.experts ? 12 : 0) + (m_.input_size ? 6 : 0) + (s_.num_runs ? 4 : 0) +
                   (m_.ranks ? 5 : 0)) * m_.num_layers + 8,
                  runner.team.size()) {
        const int64_t rows = std::max(s_.tokens, s_.samples) + kSpare;
        residual_ = runner.residual.reserve(s_.tokens * m_.hidden);
        if (m_.has_post_norms || m_.ranks)
            change_ = runner.change.reserve(s_.tokens * m_.hidden * (are_beside() ? 2 : 1));
        if (are_beside()) beside_ = change_ + s_.tokens * m_.hidden;
        if (m_.ranks) squares_ = runner.squares.reserve(s_.tokens * 2);
        wide_ = runner.wide.reserve(s_.tokens * qkv_);
        x_ = runner.x.reserve(rows * x_step_);
        mlp_ = runner.mlp.reserve(std::max(rows * mlp_step_, (expert_rows_ + kSpare) * expert_step_));
        if (m_.input_size) inputs_ = runner.inputs.reserve(s_.tokens * inputs_step_);
        if (m_.experts) runner.routing.reserve(s_.tokens, m_.experts, m_.experts_each, kChunk);
        reserve_codes();
        for (Own &own : runner.own) own.normalised.reserve((kFew / m_.hidden + kSpare) * x_step_);
        if (!only_head) plan_attention();
        if (s_.num_runs) plan_adapters();
    }

    void run(int thread) override {
        [[maybe_unused]] const TileScope tiles;
        Own &own = runner_.own[thread];
        Phase *phase = phases_.first();
        if (only_head_) return logits(phase, own);
        phase++->run(own.thread, s_.tokens, [&](int64_t t) { begin(t); });
        if (!s_.received)
            all_reduce(phase, own, -1, residual_, s_.tokens * m_.hidden, [](int64_t, int64_t) {});
        if (m_.input_size) make_inputs(phase, own);
        for (int64_t l = 0; l < m_.num_layers; ++l) {
            const Layer &layer = m_.layers[l];
            if (s_.num_runs) shrink(*phase++, own, l, kQkv, m_.hidden, [&](int64_t t, float *out) {
                normalise(residual(t), layer.input_norm, out);
            });
            with_normalised(phase, own, layer.input_norm, layer.qkv[0], [&](Source source) {
                linear(*phase++, own, layer.qkv, 3, source, s_.tokens, {l, kQkv},
                       [&](int64_t t, int64_t n, const float *y, int64_t count) {
                           std::copy_n(y, count, wide_ + t * qkv_ + n);
                       });
            });
            if (m_.whole_qk_norm && m_.ranks) {
                phase++->run(own.thread, s_.tokens, [&](int64_t t) { measure_heads(kinds_[layer.heads], t); });
                all_reduce(phase, own, l, squares_, s_.tokens * 2, [](int64_t, int64_t) {});
            }
            if (m_.whole_qk_norm)
                phase++->run(own.thread, s_.tokens, [&](int64_t t) { normalise_heads(layer, t); });
            const Kind &kind = kinds_[layer.heads];
            const int64_t width = attended(kind);
            if (kind.keys_first && layer.kv_parts)
                phase++->run(own.thread, s_.tokens, [&](int64_t t) {
                    for (int64_t h = 0; h < kind.kv_heads; ++h) store_keys(own, layer, kind, t, h);
                });
            const int64_t units = int64_t(kind.units.size()) * kind.kv_heads / kind.heads_each;
            phase++->run(own.thread, units, [&](int64_t unit) {
                const int64_t first = unit * kind.heads_each;
                for (int64_t i = first; i < first + kind.heads_each; ++i) attend(own, layer, kind, i);
            });
            const auto add = [&](int64_t t, int64_t n, const float *y, int64_t count) {
                if (change_) {
                    std::copy_n(y, count, change_ + t * m_.hidden + n);
                    return;
                }
                float *to = residual_ + t * m_.hidden + n;
                for (int64_t i = 0; i < count; ++i) to[i] += y[i];
            };
            const auto mixed = [&](int64_t t) { return mixed_ + t * attended_; };
            if (s_.num_runs) shrink(*phase++, own, l, kOutput, width, [&](int64_t t, float *out) {
                if (is_coded(layer.output)) return void(std::copy_n(mixed(t), width, out));
                widen_x(x_ + t * x_step_, width, out);
            });
            with_rows(phase, own, layer.output, {x_, x_step_}, mixed, [&](Source source) {
                linear(*phase++, own, &layer.output, 1, source, s_.tokens, {l, kOutput}, add);
            });
            add_change(phase, own, l, layer.attended_norm);
            if (layer.experts && !layer.beside) {  // which no adapter changes
                mixture(phase, own, layer);
                add_change(phase, own, l, layer.active_norm);
                continue;
            }
            if (s_.num_runs) shrink(*phase++, own, l, kGateUp, m_.hidden, [&](int64_t t, float *out) {
                normalise(residual(t), layer.mlp_norm, out);
            });
            gated_linear(phase, own, l);
            const auto active = [&](int64_t t) { return active_ + t * m_.mlp; };
            if (s_.num_runs) shrink(*phase++, own, l, kDown, layer.mlp, [&](int64_t t, float *out) {
                if (is_coded(layer.down)) return void(std::copy_n(active(t), layer.mlp, out));
                widen_x(mlp_ + t * mlp_step_, layer.mlp, out);
            });
            with_rows(phase, own, layer.down, {mlp_, mlp_step_}, active, [&](Source source) {
                linear(*phase++, own, &layer.down, 1, source, s_.tokens, {l, kDown}, add);
            });
            if (layer.beside) mixture_beside(phase, own, l);
            const float scalar = float(layer.scalar);
            const bool has_input = layer.input_gate.rows != 0;
            const float after = has_input ? 1.0f : scalar;
            if (layer.beside) add_normed(phase, own, layer.active_norm, after);
            else add_change(phase, own, l, layer.active_norm, after);
            if (!has_input) continue;
            gate_input(phase, own, l);
            with_rows(phase, own, layer.input_projection, {mlp_, mlp_step_}, active, [&](Source source) {
                linear(*phase++, own, &layer.input_projection, 1, source, s_.tokens, {l, kNoStack}, add);
            });
            add_normed(phase, own, layer.input_change_norm, scalar);  // which every rank has made
        }
        if (s_.sent) {  // the next stage computes on
            phase->run(own.thread, s_.tokens, [&](int64_t t) {
                std::copy_n(residual(t), m_.hidden, s_.sent + t * m_.hidden);
            });
            return;
        }
        if (s_.states) {
            phase->run(own.thread, s_.samples, [&](int64_t i) {
                normalise_to_state(residual(s_.sample_rows[i]), m_.norm, m_.hidden, float(m_.eps), state(i));
            });
            return;
        }
        logits(phase, own);
    }

  private:
    struct Unit {  // tokens of one sequence that attend together, to one piece or to all
        int64_t sequence, first, tokens, piece, pieces, part;
    };
    static constexpr int64_t kAll = -1;
    struct Kind : Heads {  // with what layers of such heads do in this step
        explicit Kind(const Heads &heads) : Heads(heads) {}

        int64_t heads_each = 1;   // KV heads of a unit of work
        bool keys_first = false;  // a sequence has several tiles, which read each other's keys
        std::vector<Unit> units;
    };
    template <class Of> int64_t most(Of of) const {
        int64_t found = 0;
        for (const Kind &kind : kinds_) found = std::max(found, of(kind));
        return found;
    }
    int64_t group(const Kind &kind) const { return m_.heads / kind.kv_heads; }  // heads of a KV head
    int64_t attended(const Kind &kind) const { return m_.heads * kind.head_dim; }  // numbers of all heads
    int64_t part_floats(const Kind &kind) const {
        return Gathered::floats(group(kind), banded_rows(kind.head_dim));
    }
    bool are_beside() const { return m_.experts && m_.layers[0].beside; }

    void reserve_codes() {
        int64_t bytes = 0;
        auto count = [&](const Linear &linear, int64_t rows) {
            if (is_coded(linear))
                bytes = std::max(bytes, (rows + kSpare) *
                                            CodedRows::bytes(linear.columns, linear.group));
        };
        count(m_.lm_head, s_.samples);
        count(m_.inputs, s_.tokens);
        for (int64_t l = 0; l < m_.num_layers; ++l) {
            const Layer &layer = m_.layers[l];
            for (const Linear &linear : {layer.qkv[0], layer.output, layer.gate, layer.down,
                                         layer.input_gate, layer.input_projection})
                count(linear, s_.tokens);
            if (!layer.experts) continue;
            count(layer.experts->gate, s_.tokens);
            count(layer.experts->down, expert_rows_);
        }
        if (!bytes) return;
        coded_ = runner_.coded.reserve(bytes);
        mixed_ = runner_.mixed.reserve(s_.tokens * attended_);
        active_ = runner_.active.reserve(std::max(s_.tokens * m_.mlp, expert_rows_ * m_.expert_mlp));
    }

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
            : make_(&make), call_([](const void *it) {
                  return (*static_cast<const Make *>(it))();
              }) {}
        Input operator()() const { return call_(make_); }

      private:
        const void *make_;
        Input (*call_)(const void *);
    };

    float *residual(int64_t t) { return residual_ + t * m_.hidden; }
    unsigned char *state(int64_t i) const {
        return static_cast<unsigned char *>(s_.states) + i * m_.hidden * kWeightBytes;
    }

    // ---- Rows ------------------------------------------------------------------------------------

    // The residual stream before the first layer that is here; where layers have inputs of their own, before that
    // what was embedded.
    void begin(int64_t t) {
        if (!s_.received) return embed(t);
        std::copy_n(s_.received + ((m_.input_size ? s_.tokens : 0) + t) * m_.hidden, m_.hidden, residual(t));
    }
    // Once the layers' own inputs are made of what `begin` gives: the residual stream that follows.
    void go_on(int64_t t) {
        if (s_.sent) std::copy_n(residual(t), m_.hidden, s_.sent + (s_.tokens + t) * m_.hidden);
        if (s_.received) std::copy_n(s_.received + t * m_.hidden, m_.hidden, residual(t));
    }
    KEEP_APART void embed(int64_t t) {
        const int64_t id = s_.token_ids[t] - m_.first_id;
        float *out = residual(t);
        if (m_.ranks && (id < 0 || id >= m_.lm_head.rows)) {  // another rank has it
            std::fill_n(out, m_.hidden, 0.0f);
            return;
        }
        embed_row(m_.embedding, id, m_.hidden, m_.embedding_in_bands, float(m_.embedding_multiplier), out);
    }

    void normalise(const float *in, const float *scale, float *out) { normalise(in, scale, m_.hidden, out); }
    KEEP_APART void normalise(const float *in, const float *scale, int64_t size, float *out) {
        ::normalise(in, scale, size, float(m_.eps), out);
    }

    // The queries and keys of a token, each over all heads, those of other ranks too.
    void normalise_heads(const Layer &layer, int64_t t) {
        const Kind &kind = kinds_[layer.heads];
        const int64_t queries = attended(kind), keys = kind.kv_heads * kind.head_dim;
        float *query = wide_ + t * qkv_, *key = query + queries;
        if (m_.ranks) {
            const float ranks = float(m_.num_ranks);
            multiply_by(query, layer.query_norm, queries, squares_[2 * t] / ranks, float(m_.eps), query);
            multiply_by(key, layer.key_norm, keys, squares_[2 * t + 1] / ranks, float(m_.eps), key);
            return;
        }
        normalise(query, layer.query_norm, queries, query);
        normalise(key, layer.key_norm, keys, key);
    }
    // What the other ranks need to know for that. Each has as many heads; one that several have counts equally
    // often as another.
    void measure_heads(const Kind &kind, int64_t t) {
        const float *query = wide_ + t * qkv_;
        squares_[2 * t] = mean_square(query, attended(kind));
        squares_[2 * t + 1] = mean_square(query + attended(kind), kind.kv_heads * kind.head_dim);
    }

    // The sum over all ranks, and what use(first, end) does with the numbers between them. How many units of
    // work there are must be the same on all ranks, whose threads may be of another number.
    template <class Use>
    void all_reduce(Phase *&phase, Own &own, int64_t layer, float *data, int64_t count, Use use) {
        if (!m_.ranks) return;
        const int64_t units = std::clamp<int64_t>(count / kSlice, 1, kRankLanes);
        phase++->run(own.thread, units, [&](int64_t unit) {
            const int64_t first = count * unit / units, end = count * (unit + 1) / units;
            if (!runner_.failed.load(std::memory_order_relaxed)) {
                const int64_t outcome =
                    m_.all_reduce(m_.ranks, unit, data + first, end - first, s_.timeout_ns);
                int64_t none = 0;
                if (outcome) runner_.failed.compare_exchange_strong(none, 256 * (layer + 1) + outcome);
            }
            use(first, end);
        });
    }

    // Where something comes between a product and the residual stream: adds what that makes of the product, of
    // all ranks' products together. scalar: what the sum is multiplied by, after a norm.
    void add_change(Phase *&phase, Own &own, int64_t layer, const float *norm, float scalar = 1.0f) {
        if (!change_) return;
        all_reduce(phase, own, layer, change_, s_.tokens * m_.hidden, [&](int64_t first, int64_t end) {
            if (norm) return;
            for (int64_t i = first; i < end; ++i) residual_[i] += change_[i];
        });
        if (norm) add_normed(phase, own, norm, scalar);
    }
    void add_normed(Phase *&phase, Own &own, const float *norm, float scalar) {
        phase++->run(own.thread, s_.tokens, [&](int64_t t) {
            float *change = change_ + t * m_.hidden, *to = residual(t);
            normalise(change, norm, change);
            for (int64_t i = 0; i < m_.hidden; ++i) to[i] = (to[i] + change[i]) * scalar;
        });
    }

    // A head as it is rotated: normalised before if the model does so.
    const float *normed(Own &own, const Kind &kind, const float *head, const float *norm) {
        if (!norm || m_.whole_qk_norm) return head;
        normalise(head, norm, kind.head_dim, own.head.get());
        return own.head.get();
    }
    Rotation rotation(const Layer &layer, const Kind &kind, int64_t t, float factor) const {
        const int64_t angles = s_.positions[t] * layer.angles_step;
        return {layer.cos + angles, layer.sin + angles, kind.rotary_dim / 2, factor};
    }

    // ---- Linear layers ---------------------------------------------------------------------------

    // Calls work(first token, tokens, band) for all of them, in units of work.
    template <class Work>
    void for_bands(Phase &phase, Own &own, int64_t bands, int64_t tokens, Work work) {
        const int64_t wanted = 8 * runner_.team.size();
        int64_t chunk = kChunk;
        while (chunk > 48 && bands * ((tokens + chunk - 1) / chunk) < wanted) chunk /= 2;
        const int64_t chunks = (tokens + chunk - 1) / chunk;
        const int64_t size = std::clamp<int64_t>(bands * chunks / wanted, 1, 8);
        phase.run(own.thread, (bands + size - 1) / size * chunks, [&](int64_t unit) {
            const int64_t first = unit % chunks * chunk, begin = unit / chunks * size;
            for (int64_t band = begin; band < std::min(begin + size, bands); ++band)
                work(first, std::min(chunk, tokens - first), band);
        });
    }

    // c = x W^T + b for one band, and some tokens.
    KEEP_APART void multiply(const Linear &linear, const Input &in, int64_t first, int64_t tokens,
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

    struct Place {  // of a stack of linear layers
        int64_t layer;
        Stack stack;
    };

    // Layers that are stacked: they read the same input. source() gives it when it is first needed.
    // put(token, column, results, how many) takes results.
    template <class Put>
    KEEP_APART void linear(Phase &phase, Own &own, const Linear *layers, int count, Source source,
                int64_t tokens, Place place, Put put) {
        int64_t bands = 0;
        for (int i = 0; i < count; ++i) bands += banded_rows(layers[i].rows) / kBand;
        for_bands(phase, own, bands, tokens, [&](int64_t first, int64_t num_tokens, int64_t band) {
            const Linear *layer = layers;
            int64_t column = 0;
            for (; band >= banded_rows(layer->rows) / kBand; ++layer) {
                band -= banded_rows(layer->rows) / kBand;
                column += layer->rows;
            }
            float *c = own.products.get();
            multiply(*layer, source(), first, num_tokens, band, c);
            if (s_.num_runs) add_adapters(place, layer - layers, band, first, num_tokens, c);
            const int64_t columns = std::min(kBand, layer->rows - band * kBand);
            for (int64_t t = 0; t < num_tokens; ++t)
                put(first + t, column + band * kBand, c + t * kBand, columns);
        });
    }

    // Calls use(source) with the codes of rows, each of which value(t) gives in float32.
    template <class Value, class Use>
    void with_codes(Phase *&phase, Own &own, const Linear &linear, int64_t rows, Value value,
                    Use use) {
        const int64_t columns = linear.columns, group = linear.group;
        const int64_t bytes = CodedRows::bytes(columns, group);
        if (rows * columns <= kFew) {  // each thread does it for itself
            bool is_done = false;
            use([&] {
                unsigned char *memory = own.coded.reserve((rows + kSpare) * bytes);
                for (int64_t t = 0; t < rows && !is_done; ++t)
                    code_row(value(t), columns, group, memory + t * bytes);
                is_done = true;
                return Input{nullptr, 0, CodedRows::at(memory, columns, group)};
            });
            return;
        }
        phase++->run(own.thread, rows, [&](int64_t t) {
            code_row(value(t), columns, group, coded_ + t * bytes);
        });
        use([&] { return Input{nullptr, 0, CodedRows::at(coded_, columns, group)}; });
    }

    // Calls use(source) with rows as `linear` reads them: as they are, or the codes of value(t).
    template <class Value, class Use>
    void with_rows(Phase *&phase, Own &own, const Linear &linear, Input rows, Value value, Use use) {
        if (is_coded(linear)) return with_codes(phase, own, linear, s_.tokens, value, use);
        use([&] { return rows; });
    }

    // Calls use(source) with a source of the normalised residual stream of all tokens, as `linear` reads it.
    template <class Use>
    void with_normalised(Phase *&phase, Own &own, const float *norm, const Linear &linear, Use use) {
        if (is_coded(linear)) {
            const auto value = [&](int64_t t) {
                normalise(residual(t), norm, own.row.get());
                return own.row.get();
            };
            return with_codes(phase, own, linear, s_.tokens, value, use);
        }
        if (s_.tokens * m_.hidden <= kFew) {
            bool is_done = false;
            use([&] {
                unsigned char *x = own.normalised.reserve(0);
                for (int64_t t = 0; t < s_.tokens && !is_done; ++t) normalise_to(x, t, norm);
                is_done = true;
                return Input{x, x_step_};
            });
            return;
        }
        phase++->run(own.thread, s_.tokens, [&](int64_t t) { normalise_to(x_, t, norm); });
        use([&] { return Input{x_, x_step_}; });
    }
    void normalise_to(unsigned char *x, int64_t t, const float *norm) {
        normalise_to_x(residual(t), norm, m_.hidden, float(m_.eps), x + t * x_step_);
    }

    // activation(gate) * up, by the thread that computed both.
    void gated_linear(Phase *&phase, Own &own, int64_t index) {
        const Layer &layer = m_.layers[index];
        with_normalised(phase, own, layer.mlp_norm, layer.gate, [&](Source source) {
            const int64_t bands = banded_rows(layer.mlp) / kBand;
            for_bands(*phase++, own, bands, s_.tokens, [&](int64_t first, int64_t count, int64_t band) {
                const Input in = source();
                float *gate = own.products.get(), *up = gate + kChunk * kBand;
                multiply(layer.gate, in, first, count, band, gate);
                multiply(layer.up, in, first, count, band, up);
                if (s_.num_runs) {
                    add_adapters({index, kGateUp}, 0, band, first, count, gate);
                    add_adapters({index, kGateUp}, 1, band, first, count, up);
                }
                const int64_t columns = std::min(kBand, layer.mlp - band * kBand);
                put_active(layer.down, gate, up, kBand, count, columns, first, band * kBand);
            });
        });
    }
    // Where `next` reads it: some columns of tokens, from n and t on.
    KEEP_APART void put_active(const Linear &next, const float *gate, const float *up, int64_t in_step,
                               int64_t tokens, int64_t columns, int64_t t, int64_t n) {
        if (is_coded(next))
            activate(activation_, gate, up, in_step, tokens, columns, active_ + t * m_.mlp + n, m_.mlp);
        else
            activate_to_x(activation_, gate, up, in_step, tokens, columns,
                          mlp_ + t * mlp_step_ + n * kActivationBytes, mlp_step_);
    }

    // ---- The layers' own inputs ------------------------------------------------------------------

    // Of the embedded tokens, which are not normalised for it.
    KEEP_APART void make_inputs(Phase *&phase, Own &own) {
        with_normalised(phase, own, nullptr, m_.inputs, [&](Source source) {
            linear(*phase++, own, &m_.inputs, 1, source, s_.tokens, {0, kNoStack},
                   [&](int64_t t, int64_t n, const float *y, int64_t count) {
                       float *to = inputs_ + t * inputs_step_ + n;
                       for (int64_t i = 0; i < count; ++i) to[i] = y[i] * float(m_.input_scale);
                   });
        });
        phase++->run(own.thread, s_.tokens, [&](int64_t t) {
            const float *rows = s_.input_rows + t * inputs_step_;
            for (int64_t l = 0; l < m_.num_layers; ++l) {
                float *input = inputs_ + t * inputs_step_ + l * m_.input_size;
                normalise(input, m_.inputs_norm, m_.input_size, input);
            }
            float *inputs = inputs_ + t * inputs_step_;
            for (int64_t i = 0; i < inputs_step_; ++i) inputs[i] = (inputs[i] + rows[i]) * std::sqrt(0.5f);
            go_on(t);
        });
    }

    // activation(gate) * input, of the residual stream's gate.
    KEEP_APART void gate_input(Phase *&phase, Own &own, int64_t index) {
        const Layer &layer = m_.layers[index];
        with_normalised(phase, own, nullptr, layer.input_gate, [&](Source source) {
            linear(*phase++, own, &layer.input_gate, 1, source, s_.tokens, {index, kNoStack},
                   [&](int64_t t, int64_t n, const float *y, int64_t count) {
                       const float *input = inputs_ + t * inputs_step_ + index * m_.input_size + n;
                       put_active(layer.input_projection, y, input, 0, 1, count, t, n);
                   });
        });
    }

    // ---- Mixtures of experts ---------------------------------------------------------------------

    // What the MLP has made is in change_; adds what the experts make of the residual stream. Ranks have one sum
    // for both.
    KEEP_APART void mixture_beside(Phase *&phase, Own &own, int64_t index) {
        const Layer &layer = m_.layers[index];
        const Beside &beside = *layer.beside;
        phase++->run(own.thread, s_.tokens, [&](int64_t t) {
            std::copy_n(change_ + t * m_.hidden, m_.hidden, beside_ + t * m_.hidden);
        });
        mixture(phase, own, layer);
        all_reduce(phase, own, index, change_, 2 * s_.tokens * m_.hidden, [](int64_t, int64_t) {});
        phase++->run(own.thread, s_.tokens, [&](int64_t t) {
            float *change = change_ + t * m_.hidden, *of_mlp = beside_ + t * m_.hidden;
            normalise(of_mlp, beside.mlp_norm, of_mlp);
            normalise(change, beside.output_norm, change);
            for (int64_t i = 0; i < m_.hidden; ++i) change[i] += of_mlp[i];
        });
    }

    // Adds what each token's experts make of its normalised residual stream to that.
    KEEP_APART void mixture(Phase *&phase, Own &own, const Layer &layer) {
        Routing &routing = runner_.routing;
        const Linear &gate = layer.experts->gate, &down = layer.experts->down;
        const Beside *beside = layer.beside;
        const float *input_norm = beside ? beside->input_norm : layer.mlp_norm;
        const float *router_norm = beside ? beside->router_norm : layer.mlp_norm;
        const float *factors = beside ? beside->factors : nullptr;
        const bool is_apart = is_coded(gate) || beside;
        with_normalised(phase, own, router_norm, layer.router, [&](Source source) {
            linear(*phase++, own, &layer.router, 1, source, s_.tokens, {0, kNoStack},
                   [&](int64_t t, int64_t n, const float *y, int64_t count) {
                       std::copy_n(y, count, routing.logits(t) + n);
                   });
            phase++->run(own.thread, s_.tokens,
                         [&](int64_t t) { routing.choose(t, m_.are_weights_normed, factors); });
            if (!is_apart) gate_experts(*phase++, own, layer, source);
        });
        if (is_apart)
            with_normalised(phase, own, input_norm, gate, [&](Source source) {
                gate_experts(*phase++, own, layer, source);
            });
        const auto add = [&](Source source) { add_experts(*phase++, own, layer, source); };
        if (!is_coded(down)) return add([&] { return Input{mlp_, expert_step_}; });
        with_codes(phase, own, down, expert_rows_,
                   [&](int64_t row) { return active_ + row * m_.expert_mlp; }, add);
    }

    // activation(gate) * up, a row for each token at each of its experts. How many units of work there are
    // must not depend on the routing, which is another layer's when a thread comes late.
    void gate_experts(Phase &phase, Own &own, const Layer &layer, Source source) {
        const int64_t bands = banded_rows(m_.expert_mlp) / kBand;
        const int64_t units = std::min(32 * runner_.team.size(), expert_rows_ * bands);
        int64_t gathered = -1;
        Input in = {};
        phase.run(own.thread, units, [&](int64_t unit) {
            const std::vector<Segment> &segments = runner_.routing.segments();
            const int64_t all = int64_t(segments.size()) * bands;
            for (int64_t at = all * unit / units; at < all * (unit + 1) / units; ++at) {
                const Segment &segment = segments[at / bands];
                if (gathered != at / bands) {
                    gathered = at / bands;
                    in = rows_of_segment(own, source(), segment);
                }
                const Expert &expert = layer.experts[segment.expert];
                const int64_t band = at % bands, columns = std::min(kBand, m_.expert_mlp - band * kBand);
                float *gate = own.products.get(), *up = gate + kChunk * kBand;
                multiply(expert.gate, in, 0, segment.count, band, gate);
                multiply(expert.up, in, 0, segment.count, band, up);
                const int64_t row = segment.first, n = band * kBand;
                if (is_coded(expert.down))
                    activate(of_experts_, gate, up, kBand, segment.count, columns,
                             active_ + row * m_.expert_mlp + n, m_.expert_mlp);
                else
                    activate_to_x(of_experts_, gate, up, kBand, segment.count, columns,
                                  mlp_ + row * expert_step_ + n * kActivationBytes, expert_step_);
            }
        });
    }
    // What the products of a segment read: its tokens' rows, one after the other.
    Input rows_of_segment(Own &own, const Input &all, const Segment &segment) {
        const Routing &routing = runner_.routing;
        const CodedRows &codes = all.coded;
        if (segment.count == 1) {
            const int64_t t = routing.token_of(segment.first);
            if (all.x) return {all.x + t * all.step, all.step};
            return {nullptr, 0, {codes.memory + t * codes.step, codes.step, codes.columns, codes.groups}};
        }
        if (all.x) {
            unsigned char *to = own.gathered.reserve((kChunk + kSpare) * all.step);
            for (int64_t i = 0; i < segment.count; ++i)
                std::copy_n(all.x + routing.token_of(segment.first + i) * all.step,
                            m_.hidden * kActivationBytes, to + i * all.step);
            return {to, all.step};
        }
        unsigned char *to = own.gathered.reserve((kChunk + kSpare) * codes.step);
        for (int64_t i = 0; i < segment.count; ++i)
            std::copy_n(codes.memory + routing.token_of(segment.first + i) * codes.step, codes.step,
                        to + i * codes.step);
        return {nullptr, 0, {to, codes.step, codes.columns, codes.groups}};
    }

    // Adds the experts' outputs to the residual stream. A unit of work has some columns of all experts, so
    // that nobody else adds to them, and a token's experts come in their order.
    void add_experts(Phase &phase, Own &own, const Layer &layer, Source source) {
        const int64_t bands = banded_rows(m_.hidden) / kBand;
        const int64_t size = std::clamp<int64_t>(bands / (8 * runner_.team.size()), 1, 8);
        phase.run(own.thread, (bands + size - 1) / size, [&](int64_t unit) {
            const Routing &routing = runner_.routing;
            const Input in = source();
            float *c = own.products.get();
            const int64_t begin = unit * size * kBand;
            const int64_t width = std::min((unit + 1) * size * kBand, m_.hidden) - begin;
            for (int64_t t = 0; change_ && t < s_.tokens; ++t)
                std::fill_n(change_ + t * m_.hidden + begin, width, 0.0f);
            float *all = change_ ? change_ : residual_;
            for (const Segment &segment : routing.segments())
                for (int64_t band = unit * size; band < std::min((unit + 1) * size, bands); ++band) {
                    const Linear &down = layer.experts[segment.expert].down;
                    multiply(down, in, segment.first, segment.count, band, c);
                    const int64_t columns = std::min(kBand, m_.hidden - band * kBand);
                    for (int64_t i = 0; i < segment.count; ++i) {
                        const int64_t row = segment.first + i;
                        float *to = all + routing.token_of(row) * m_.hidden + band * kBand;
                        const float weight = routing.weight_of(row), *y = c + i * kBand;
                        for (int64_t n = 0; n < columns; ++n) to[n] += weight * y[n];
                    }
                }
        });
    }

    void logits(Phase *&phase, Own &own) {
        // As states, also where X is wider, so that the logits are the same if Python has those between.
        const auto of_row = [&](int64_t i) -> const unsigned char * {
            if (only_head_) return state(i);
            normalise_to_state(residual(s_.sample_rows[i]), m_.norm, m_.hidden, float(m_.eps),
                               own.state.get());
            return own.state.get();
        };
        const auto put = [&](int64_t t, int64_t n, const float *y, int64_t count) {
            float *to = s_.logits + t * m_.lm_head.rows + n;
            const float multiplier = float(m_.logit_multiplier), softcap = float(m_.logit_softcap);
            for (int64_t i = 0; i < count; ++i) to[i] = y[i] * multiplier;
            for (int64_t i = 0; softcap && i < count; ++i) to[i] = std::tanh(to[i] / softcap) * softcap;
        };
        const auto of = [&](Source source) {
            linear(*phase++, own, &m_.lm_head, 1, source, s_.samples, {0, kNoStack}, put);
        };
        if (is_coded(m_.lm_head)) {
            const auto value = [&](int64_t i) {
                widen_state(of_row(i), m_.hidden, own.row.get());
                return own.row.get();
            };
            return with_codes(phase, own, m_.lm_head, s_.samples, value, of);
        }
        phase++->run(own.thread, s_.samples,
                     [&](int64_t i) { copy_state(of_row(i), m_.hidden, x_ + i * x_step_); });
        of([&] { return Input{x_, x_step_}; });
    }

    // ---- LoRA adapters ---------------------------------------------------------------------------

    void plan_adapters() {
        low_ = runner_.low.reserve(s_.tokens * s_.width);
        for (int64_t i = 0; i < s_.num_runs; ++i) {
            const AdapterRun &run = s_.runs[i];
            for (int64_t t = 0; t < run.tokens; t += kLowRankTokens)
                adapted_.push_back({run.first + t, std::min(kLowRankTokens, run.tokens - t), run.layers});
        }
    }

    // low_ = A x of the tokens that have an adapter. read(t, out) gives x, of so many columns.
    template <class Read>
    KEEP_APART void shrink(Phase &phase, Own &own, int64_t layer, Stack stack, int64_t columns,
                           Read read) {
        const int64_t step = low_rank_columns(columns), tiles = int64_t(adapted_.size());
        // Few tiles are split, by ranks, so that every thread has some.
        const int64_t each = tiles < 2 * runner_.team.size() ? 8 : s_.width;
        const int64_t blocks = (s_.width + each - 1) / each;
        phase.run(own.thread, tiles * blocks, [&](int64_t unit) {
            const AdapterRun &tile = adapted_[unit / blocks];
            const int64_t begin = unit % blocks * each;
            float *rows = nullptr;
            int64_t at = 0;  // of this change's in low_
            for (int64_t i = stack.first; i < stack.first + stack.count; ++i) {
                const LowRank &change = tile.layers[layer].changes[i];
                // In whole packs: the unit that has a pack's first row has all of them.
                const int64_t from = packed_rows(std::max<int64_t>(begin - at, 0));
                const int64_t to = std::min(packed_rows(begin + each - at), change.rank);
                if (from < to) {
                    if (!rows) rows = adapter_input(own, tile, columns, step, read);
                    shrink_by(rows, tile.tokens, change.down, from, to, step,
                              low_ + tile.first * s_.width + at, s_.width);
                }
                at += change.rank;
            }
        });
    }
    static int64_t packed_rows(int64_t rows) {
        return (std::max<int64_t>(rows, 0) + kLowRankRows - 1) / kLowRankRows * kLowRankRows;
    }
    template <class Read>
    float *adapter_input(Own &own, const AdapterRun &tile, int64_t columns, int64_t step, Read read) {
        float *rows = own.adapted.reserve(kLowRankTokens * step);
        for (int64_t t = 0; t < tile.tokens; ++t) {
            read(tile.first + t, rows + t * step);
            std::fill(rows + t * step + columns, rows + (t + 1) * step, 0.0f);
        }
        return rows;
    }

    // c, of one band of a stack's layer `linear` and some tokens, += what their adapters add.
    KEEP_APART void add_adapters(Place place, int64_t linear, int64_t band, int64_t first,
                                 int64_t tokens, float *c) {
        for (int64_t i = 0; i < s_.num_runs; ++i) {
            const AdapterRun &run = s_.runs[i];
            const int64_t from = std::max(first, run.first);
            const int64_t to = std::min(first + tokens, run.first + run.tokens);
            if (from >= to) continue;
            int64_t at = 0;
            const Stack stack = place.stack;
            for (int64_t j = stack.first; j < stack.first + stack.count; ++j) {
                const LowRank &change = run.layers[place.layer].changes[j];
                const int64_t own_band = band - change.first;
                if (change.linear == linear && own_band >= 0 && own_band < change.bands) {
                    for (int64_t t = from; t < to; ++t)
                        add_low_rank_band(low_ + t * s_.width + at, change.up, own_band, change.rank,
                                          float(change.scale), c + (t - first) * kBand);
                }
                at += change.rank;
            }
        }
    }

    // ---- Attention -------------------------------------------------------------------------------

    void plan_attention() {
        int64_t floats = 0, counters = 0;
        for (Kind &kind : kinds_) {
            const int64_t parts = plan_attention(kind) * kind.kv_heads;
            floats = std::max(floats, parts * part_floats(kind));
            counters = std::max(counters, parts);
        }
        parts_ = runner_.parts.reserve(floats);
        if (counters) arrived_.reset(new std::atomic<int32_t>[counters]());
    }
    // The number of parts that the units give.
    int64_t plan_attention(Kind &kind) {
        const int64_t tile = std::max<int64_t>(1, kQueries / group(kind));
        int64_t parts = 0;
        for (int64_t i = 0; i < s_.sequences; ++i) {
            const int64_t first = s_.query_starts[i], end = s_.query_starts[i + 1];
            kind.keys_first |= end - first > tile;
            const int64_t pieces = end == first ? 0 : s_.positions[end - 1] / kPiece + 1;
            if (end - first == 1 && pieces > 1) {
                for (int64_t piece = 0; piece < pieces; ++piece)
                    kind.units.push_back({i, first, 1, piece, pieces, parts});
                parts += pieces;
                continue;
            }
            // The last attend to most.
            for (int64_t t = first + (end - first - 1) / tile * tile; t >= first; t -= tile)
                kind.units.push_back({i, t, std::min(tile, end - t), kAll, 1, 0});
        }
        // All heads of a position lie side by side in memory.
        if (int64_t(kind.units.size()) >= 8 * runner_.team.size()) kind.heads_each = kind.kv_heads;
        return parts;
    }

    KEEP_APART void store_keys(Own &own, const Layer &layer, const Kind &kind, int64_t t, int64_t kv_head) {
        const int64_t d = kind.head_dim;
        const float *key = wide_ + t * qkv_ + attended(kind) + kv_head * d;
        const float *value = key + (layer.kv_parts - 1) * kind.kv_heads * d;
        float factor = 1.0f;
        if (m_.norms_values) factor = 1.0f / std::sqrt(mean_square(value, d) + float(m_.eps));
        const HeadKeys to = {&layer, places(kind), kv_head, nullptr};
        own.attention[layer.heads]->put(to, s_.kv_slots[layer.group * s_.tokens + t],
                                        normed(own, kind, key, layer.key_norm),
                                        rotation(layer, kind, t, 1.0f), value, factor);
    }

    KVPlaces places(const Kind &kind) const { return {m_.block_size, kind.kv_heads, kind.head_dim}; }
    HeadKeys keys_of(const Layer &layer, const Kind &kind, const Unit &unit, int64_t kv_head) {
        const int64_t row = layer.group * s_.sequences + unit.sequence;
        return {&layer, places(kind), kv_head, s_.block_tables + row * s_.max_blocks};
    }
    Rows rows_of(const Layer &layer, const Kind &kind, const Unit &unit) {
        return {s_.positions[unit.first], unit.tokens, group(kind), layer.window};
    }

    // The positions that a head of a unit attends to first; none behind the last unit.
    Positions first_positions(const Layer &layer, const Kind &kind, int64_t index) {
        const bool is_one = index < int64_t(kind.units.size()) * kind.kv_heads;
        const Unit &unit = kind.units[is_one ? index / kind.kv_heads : 0];
        const HeadKeys keys = keys_of(layer, kind, unit, index % kind.kv_heads);
        if (!is_one) return {keys, 0, 0};
        const Rows rows = rows_of(layer, kind, unit);
        return first_of(keys, rows, std::max<int64_t>(unit.piece, 0));
    }

    KEEP_APART void attend(Own &own, const Layer &layer, const Kind &kind, int64_t index) {
        const Unit &unit = kind.units[index / kind.kv_heads];
        const int64_t kv_head = index % kind.kv_heads, group = this->group(kind);
        const Positions next = first_positions(layer, kind, index + 1);
        Attention &attention = *own.attention[layer.heads];
        const int64_t d = kind.head_dim;
        const HeadKeys keys = keys_of(layer, kind, unit, kv_head);
        const Rows rows = rows_of(layer, kind, unit);
        const bool is_last = unit.piece == kAll || unit.piece == unit.pieces - 1;
        for (int64_t t = 0; t < unit.tokens; ++t) {
            const int64_t position = s_.positions[unit.first + t];
            const float factor = kind.query_factors ? kind.query_factors[position] : 1.0f;
            if (!kind.keys_first && is_last && layer.kv_parts)
                store_keys(own, layer, kind, unit.first + t, kv_head);
            const Rotation by = rotation(layer, kind, unit.first + t, factor);
            for (int64_t g = 0; g < group; ++g) {
                const float *query = wide_ + (unit.first + t) * qkv_ + (kv_head * group + g) * d;
                attention.put_query(t * group + g, normed(own, kind, query, layer.query_norm), by);
            }
        }
        attention.take(rows.count());
        if (unit.piece == kAll) {
            attention.attend(keys, rows, next);
            put_attended(attention.gathered(), unit, kv_head, layer, kind);
            return;
        }
        const int64_t step = attention.step(), first = unit.part * kind.kv_heads + kv_head;
        const auto part = [&](int64_t piece) {
            float *memory = parts_ + (first + piece * kind.kv_heads) * part_floats(kind);
            return Gathered::at(memory, group, step);
        };
        attention.attend_piece(keys, rows, unit.piece, next);
        const Gathered own_part = part(unit.piece);
        own_part.clear(group, step);
        merge(own_part, attention.piece(), group, step);
        if (arrived_[first].fetch_add(1, std::memory_order_acq_rel) + 1 < unit.pieces) return;
        arrived_[first].store(0, std::memory_order_relaxed);  // for the next layer
        attention.gathered().clear(group, step);
        for (int64_t piece = 0; piece < unit.pieces; ++piece)
            merge(attention.gathered(), part(piece), group, step);
        put_attended(attention.gathered(), unit, kv_head, layer, kind);
    }

    void put_attended(const Gathered &all_rows, const Unit &unit, int64_t kv_head, const Layer &layer,
                      const Kind &kind) {
        const int64_t d = kind.head_dim, step = banded_rows(d), group = this->group(kind);
        for (int64_t row = 0; row < unit.tokens * group; ++row) {
            const int64_t token = unit.first + row / group;
            const int64_t column = (kv_head * group + row % group) * d;
            const float *mixed = all_rows.mixed + row * step;
            float weight = all_rows.weight[row];
            // A sink is one score more, whose value is 0: once, after all pieces.
            if (layer.sinks)
                weight += std::exp(layer.sinks[kv_head * group + row % group] - all_rows.peak[row]);
            if (is_coded(layer.output))
                divide(mixed, weight, d, mixed_ + token * attended_ + column);
            else
                divide_to_x(mixed, weight, d, x_ + token * x_step_ + column * kActivationBytes);
        }
    }

    Runner &runner_;
    const Model &m_;
    const Step s_;
    const bool only_head_;
    const Activation activation_{m_.is_gelu != 0, 0, 0};
    const Activation of_experts_{m_.is_gelu != 0, float(m_.swiglu_alpha), float(m_.swiglu_limit)};
    std::vector<Kind> kinds_;
    const int64_t qkv_, attended_;  // between tokens: of queries, keys and values; of all heads
    const int64_t x_step_, mlp_step_, expert_step_, expert_rows_, inputs_step_;
    std::unique_ptr<std::atomic<int32_t>[]> arrived_;
    Phases phases_;
    float *residual_, *wide_, *change_ = nullptr, *parts_ = nullptr, *squares_ = nullptr;
    float *inputs_ = nullptr;  // the layers' own, of each token
    float *beside_ = nullptr;  // what the MLP gives that experts are beside of; it follows change_
    unsigned char *x_;    // of X: normalised, then what the heads have attended to
    unsigned char *mlp_;  // of X: activation(gate) * up
    // Where products read codes: what the heads have attended to, activation(gate) * up, and codes.
    float *mixed_ = nullptr, *active_ = nullptr;
    unsigned char *coded_ = nullptr;
    float *low_ = nullptr;             // A x of each token that has an adapter, change after change
    std::vector<AdapterRun> adapted_;  // those tokens, a few at a time
};

class Likeliest : public Job {
  public:
    Likeliest(const float *logits, int64_t rows, int64_t size, int64_t *ids, int64_t threads)
        : logits_(logits), rows_(rows), size_(size), ids_(ids), phase_(1, threads) {}
    void run(int thread) override {
        phase_.first()->run(thread, rows_, [&](int64_t i) {
            ids_[i] = likeliest(logits_ + i * size_, size_);
        });
    }

  private:
    const float *logits_;
    const int64_t rows_, size_;
    int64_t *ids_;
    Phases phase_;
};

void run(void *runner, const Step *step, bool only_head) {
    auto &made = *static_cast<Runner *>(runner);
    made.failed.store(0, std::memory_order_relaxed);
    made.team.run(std::make_shared<Run>(made, *step, only_head));
}

}  // namespace

bool enter_formats(Formats number, const Format &format) {
    formats[number] = format;
    return true;
}

// A bit for each of Formats that has entered.
extern "C" int64_t penstock_formats() {
    int64_t mask = 0;
    for (int64_t i = 0; i < kNumFormats; ++i)
        if (formats[i].multiply_codes || formats[i].multiply_rows) mask |= int64_t(1) << i;
    return mask;
}

// What runs the steps of a model, to be freed by penstock_free. The model must outlive it.
extern "C" void *penstock_make(const Model *model, int64_t threads) {
    return new Runner(*model, threads);
}
extern "C" void penstock_free(void *runner) { delete static_cast<Runner *>(runner); }

// A whole step. If `states` is given, writes the last layer's normalised states and no logits. Returns how many
// experts it has read, over all layers.
extern "C" int64_t penstock_step(void *runner, const Step *step) {
    run(runner, step, false);
    return static_cast<Runner *>(runner)->routing.num_read();
}

// Of the last step: see Runner.
extern "C" int64_t penstock_failed(void *runner) {
    return static_cast<Runner *>(runner)->failed.load(std::memory_order_acquire);
}

// Only the output layer: the logits of `samples` rows of `states`, in a step without tokens.
extern "C" void penstock_logits(void *runner, const Step *step) {
    run(runner, step, true);
}

// What a step reads of the executor's tables.
extern "C" void penstock_gather(const Gather *wanted) { gather(*wanted); }

// The likeliest id of each row of logits. A few rows are not worth waking a thread for.
extern "C" void penstock_likeliest(void *runner, const float *logits, int64_t rows, int64_t size,
                                   int64_t *ids) {
    Team &team = static_cast<Runner *>(runner)->team;
    const auto job = std::make_shared<Likeliest>(logits, rows, size, ids, team.size());
    if (rows < 4) return job->run(0);
    team.run(job);
}

// What computes products, for people to read: with plain weights, and with codes or null where none can be.
extern "C" const char *penstock_products() {
    static const std::string made = plain_products();
    return made.c_str();
}
extern "C" const char *penstock_code_products() {
    static const std::string made = [] {
        for (const Format &format : formats)
            if (format.products) return format.products();
        return kv_products();
    }();
    return made.empty() ? nullptr : made.c_str();
}
