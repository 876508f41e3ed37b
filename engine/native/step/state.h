// The phases of a step share the model, the step, and memory for what they pass to each other.
//
// This header and those that include it are step.cpp's alone, hence their unnamed namespaces.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <new>
#include <vector>

#include "models/parts/experts/routing.h"
#include "native/products/formats.h"
#include "native/products/grouped.h"
#include "structs.h"
#include "team.h"
#include "weights.h"

// Marks functions that take long beside a call: where each is inlined, the compiler takes twice as long.
#define KEEP_APART __attribute__((noinline))

namespace {

// Tokens of a unit of work: few enough that their activations stay in the L2 cache.
constexpr int64_t kChunk = 192;
// Queries that attend together.
constexpr int64_t kQueries = 96;
// Activations so few that every thread normalises them itself, which takes less time than to wait for
// another.
constexpr int64_t kFew = 8192;

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

// The numbers of a position that are mixed.
int64_t value_dim(const Heads &heads) { return heads.latent_dim ? heads.latent_dim : heads.head_dim; }

// The distance between rows of X, in bytes. Rows a multiple of 4 KiB apart would share few cache lines.
int64_t padded(int64_t columns) { return (columns + 31) / 32 * 32 * kActivationBytes + 64; }

// Before any of them enters, which is when the library is loaded.
constinit Format formats[kNumFormats] = {};

// Whether it reads activations of 8 bits.
bool is_coded(const Linear &linear) { return formats[linear.format].multiply_codes; }

// The memory of one thread.
struct Worker {
    int number;
    std::vector<std::unique_ptr<Attention>> attention;  // of each kind of heads
    Bytes normalised, gathered, coded;
    Buffer<float> adapted;  // what adapters read of some tokens
    Buffer<float> recurrence;
    Buffer<float> ordered;  // a row, in the order of the layer that reads it
    std::unique_ptr<float[]> row;  // of x, before it is coded
    std::unique_ptr<float[]> head;
    std::unique_ptr<unsigned char[]> state;
    std::unique_ptr<float[]> products{new float[2 * kChunk * kBand]};
};

// Memory that lasts from step to step, and the threads.
struct Workspace {
    Workspace(const Model &of, int64_t threads) : model(of), team(int(threads)) {
        int64_t widest = 0;
        for (int64_t i = 0; i < model.num_kinds; ++i) widest = std::max(widest, model.kinds[i].head_dim);
        for (int64_t i = 0; i < threads; ++i) {
            std::vector<std::unique_ptr<Attention>> attention;
            for (int64_t j = 0; j < model.num_kinds; ++j) {
                const Heads &heads = model.kinds[j];
                const int64_t rows = std::max(model.heads / heads.kv_heads, kQueries);
                attention.push_back(make_attention(rows, heads.head_dim, value_dim(heads)));
            }
            const int64_t state_bytes = model.hidden * kWeightBytes;
            const int64_t row = std::max(model.hidden, model.latents.query_rank);
            workers.push_back({int(i), std::move(attention), {}, {}, {}, {}, {}, {},
                               std::unique_ptr<float[]>(new float[row]),
                               std::unique_ptr<float[]>(new float[widest]),
                               std::unique_ptr<unsigned char[]>(new unsigned char[state_bytes])});
        }
    }

    const Model &model;
    std::vector<Worker> workers;
    Buffer<float> residual, change, wide, parts, mixed, active, low, squares, inputs, drafted, latents, queries;
    Bytes x, mlp, coded;
    Routing routing;
    // 0, or of the last step 256 times (1 + the layer) where a sum over all ranks failed, plus its outcome. The
    // step then goes on with numbers that mean nothing.
    std::atomic<int64_t> failed{0};
    Team team;  // the last: its threads end before the rest does
};

// One thread on its way through the phases of a step, which are the same for all threads.
struct StepThread {
    Worker &worker;
    Phase *phase;  // the next

    template <class Work> void run(int64_t units, Work work) { phase++->run(worker.number, units, work); }
};

struct StepState {
    StepState(Workspace &memory, const Step &of)
        : workspace(memory), model(memory.model), step(of),
          qkv_size(most([](const Layer &layer) {
              int64_t rows = 0;
              for (const Linear &linear : layer.attention.qkv) rows += linear.rows;
              for (const Linear &linear : layer.delta_net.projections) rows += linear.rows;
              return rows;
          })),
          attended_size(most([](const Layer &layer) {
              return std::max(layer.attention.output.columns, layer.delta_net.output.columns);
          })),
          x_step(padded(std::max({model.hidden, attended_size, model.merge.fc.columns, model.latents.query_rank,
                                  model.heads * model.latents.nope_dim}))),
          mlp_step(padded(model.mlp)),
          expert_step(padded(model.experts.size)), expert_rows(step.tokens * model.experts.num_per_token) {
        const int64_t rows = std::max(step.tokens, step.samples) + kSpare;
        residual = memory.residual.reserve(step.tokens * model.hidden);
        if (model.has_post_norms || model.ranks.group)
            change = memory.change.reserve(step.tokens * model.hidden * (are_beside() ? 2 : 1));
        wide = memory.wide.reserve(step.tokens * qkv_size);
        if (step.draft_starts) drafted = memory.drafted.reserve(drafted_before(model.num_layers));
        x = memory.x.reserve(rows * x_step);
        mlp = memory.mlp.reserve(rows * mlp_step + (expert_rows + kSpare) * expert_step);
        expert_mlp = mlp + rows * mlp_step;
        reserve_codes();
        for (Worker &worker : memory.workers)
            worker.normalised.reserve((kFew / model.hidden + kSpare) * x_step);
    }

    // More than there are.
    int64_t num_phases() const {
        return (15 + (model.latents.latent_dim ? 5 : 0) + (model.experts.num_experts ? 18 : 0) +
                (model.inputs.size ? 6 : 0) + (step.num_runs ? 4 : 0) + (model.ranks.group ? 5 : 0)) *
                   model.num_layers + 11 + step.num_deep;
    }

    float *residual_of(int64_t t) const { return residual + t * model.hidden; }
    int64_t num_drafts(int64_t sequence) const {
        return step.draft_starts ? step.draft_starts[sequence + 1] - step.draft_starts[sequence] : 0;
    }
    // Of all drafts, what a delta net's projections have given: (drafts, qkv_size).
    float *drafted_of(int64_t layer) const { return drafted + drafted_before(layer); }
    // Adds some columns that a product gives for a token to the residual stream, or puts them where something comes
    // between.
    void add(int64_t t, int64_t n, const float *y, int64_t count) const {
        if (change) {
            std::copy_n(y, count, change + t * model.hidden + n);
            return;
        }
        float *to = residual + t * model.hidden + n;
        for (int64_t i = 0; i < count; ++i) to[i] += y[i];
    }

    Workspace &workspace;
    const Model &model;
    const Step step;
    const int64_t qkv_size, attended_size;  // between tokens: of what a mixer's first product gives; of what it gives to its last
    const int64_t x_step, mlp_step, expert_step, expert_rows;
    float *residual, *wide, *change = nullptr, *drafted = nullptr;
    unsigned char *x;    // of X: normalised, then what the heads have attended to
    unsigned char *mlp, *expert_mlp;  // of X: activation(gate) * up, of MLPs and of experts
    // Where products read codes: what the heads have attended to, activation(gate) * up, and codes.
    float *mixed = nullptr, *active = nullptr, *expert_active = nullptr;
    unsigned char *coded = nullptr;

  private:
    template <class Of> int64_t most(Of of) const {
        int64_t found = 0;
        for (int64_t l = 0; l < model.num_layers; ++l) found = std::max(found, of(model.layers[l]));
        return found;
    }
    int64_t drafted_before(int64_t layer) const {
        int64_t nets = 0;
        for (int64_t l = 0; l < layer; ++l) nets += model.layers[l].delta_net.output.rows > 0;
        return nets * step.draft_starts[step.sequences] * qkv_size;
    }
    bool are_beside() const { return model.experts.num_experts && model.layers[0].mlp.size; }

    void reserve_codes() {
        int64_t bytes = 0;
        auto count = [&](const Linear &linear, int64_t rows) {
            if (is_coded(linear))
                bytes = std::max(bytes, (rows + kSpare) * CodedRows::bytes(linear.columns, linear.group));
        };
        count(model.head.linear, step.samples);
        count(model.inputs.projection, step.tokens);
        for (int64_t l = 0; l < model.num_layers; ++l) {
            const Layer &layer = model.layers[l];
            const DeltaNetLayer &net = layer.delta_net;
            for (const Linear &linear : {layer.attention.qkv[0], layer.attention.output, layer.latent.query,
                                         net.projections[0], net.projections[2], net.output, layer.mlp.gate,
                                         layer.mlp.down, layer.input.gate, layer.input.projection})
                count(linear, step.tokens);
            if (!layer.experts.each) continue;
            count(layer.experts.shared.gate, step.tokens);
            count(layer.experts.shared.down, step.tokens);
            count(layer.experts.each->gate, step.tokens);
            count(layer.experts.each->down, expert_rows);
        }
        if (!bytes) return;
        coded = workspace.coded.reserve(bytes);
        mixed = workspace.mixed.reserve(step.tokens * attended_size);
        active = workspace.active.reserve(step.tokens * model.mlp + expert_rows * model.experts.size);
        expert_active = active + step.tokens * model.mlp;
    }
};

}  // namespace
