// One step of a decoder on CPU: token ids in, logits out, in a single call.
//
// At batch 1 a step is one pass over the weights, and it is as fast as memory only if nothing comes
// between two matrices: no interpreter, no repacking, no thread that waits long for another. So all
// layers run in one job of a team of threads (team.h), in five phases a layer while tokens are few.
// Each part of a model has its phases in engine/models/parts/NAME/step.h; this is their order.
//
// The arithmetic is that of engine/models/decoder/model.py, which runs where this cannot be compiled, and
// which this is tested against. Here the residual stream and all sums are float32. What depends on the types
// of weights, keys and values, and on the formats of codes, is in other sources (weights.h, formats.h): so this
// one, which takes the compiler longest, is compiled once, whatever models are served.

#include <numeric>

#include "context.h"
#include "draw.h"
#include "inputs.h"
#include "trial.h"
#include "models/parts/attention/step.h"
#include "models/parts/delta_net/step.h"
#include "models/parts/experts/step.h"
#include "models/parts/latent_attention/step.h"
#include "models/parts/mlp/step.h"
#include "models/parts/per_layer_inputs/step.h"
#include "models/parts/vocabulary/step.h"

namespace {

class StepJob : public Job {
  public:
    StepJob(Workspace &workspace, const Step &step, bool only_head)
        : context_(workspace, step), only_head_(only_head),
          phases_(context_.state.num_phases(), workspace.team.size()) {}

    void run(int number) override {
        [[maybe_unused]] const TileScope tiles;
        const Model &model = context_.state.model;
        const Step &step = context_.state.step;
        StepThread thread{context_.state.workspace.workers[number], phases_.first()};
        if (only_head_) return head_.put_logits(thread, true);
        embedding_.run(thread);
        if (model.merge.fc.rows) embedding_.merge(thread);
        if (model.inputs.size) inputs_.make(thread);
        for (int64_t l = 0; l < model.num_layers; ++l) {
            run_layer(thread, l);
            if (l < step.num_deep) embedding_.deepen(thread, l);
        }
        if (step.sent) return head_.send(thread);
        if (step.all_states) head_.put_all_states(thread);
        if (step.states) return head_.put_states(thread);
        head_.put_logits(thread, false);
    }

  private:
    void run_layer(StepThread &thread, int64_t index) {
        const Layer &layer = context_.state.model.layers[index];
        const bool has_mlp = layer.mlp.size, has_experts = layer.experts.each, has_input = layer.input.gate.rows;
        if (layer.delta_net.output.rows) delta_net_.run(thread, index);
        else if (layer.latent.latent_norm) latents_.run(thread, index);
        else attention_.run(thread, index);
        context_.norms.add_change(thread, index, layer.attended_norm);
        context_.norms.normalise_sums(thread, layer.attended_sum_norm);
        if (has_mlp) mlp_.run(thread, index);
        const float scalar = has_input ? 1.0f : float(layer.scalar);
        if (has_mlp && has_experts) {
            experts_.run_beside_mlp(thread, index);
            context_.norms.add_normed(thread, layer.active_norm, scalar);
        } else {
            if (has_experts) experts_.run(thread, index);
            context_.norms.add_change(thread, index, layer.active_norm, scalar);
        }
        context_.norms.normalise_sums(thread, layer.active_sum_norm);
        if (has_input) inputs_.add(thread, index);
    }

    StepContext context_;
    EmbeddingPhases embedding_{context_};
    PerLayerInputPhases inputs_{context_};
    AttentionPhases attention_{context_};
    LatentPhases latents_{context_, attention_};
    DeltaNetPhases delta_net_{context_};
    MlpPhases mlp_{context_};
    ExpertsPhases experts_{context_};
    HeadPhases head_{context_};
    const bool only_head_;
    Phases phases_;
};

// Drafts of a step are right: recurrent states go on over them.
class Acceptance : public Job {
  public:
    Acceptance(Workspace &workspace, const Step &step, const int64_t *accepted)
        : context_(workspace, step), accepted_(accepted, accepted + step.sequences),
          phases_(step.draft_starts ? context_.state.model.num_layers : 0, workspace.team.size()) {}

    void run(int number) override {
        const Model &model = context_.state.model;
        StepThread thread{context_.state.workspace.workers[number], phases_.first()};
        for (int64_t l = 0; l < model.num_layers; ++l)
            if (model.layers[l].delta_net.output.rows) delta_net_.accept(thread, l, accepted_.data());
    }

  private:
    StepContext context_;
    DeltaNetPhases delta_net_{context_};
    const std::vector<int64_t> accepted_;
    Phases phases_;
};

class Draws : public Job {
  public:
    Draws(const Draw &draw, int64_t threads) : draw_(draw), phase_(1, threads) {}
    void run(int thread) override {
        phase_.first()->run(thread, draw_.rows, [&](int64_t row) {
            if (draw_.slots[row] >= 0) draw_.ids[row] = RowDraw(draw_, row).id();
        });
    }

  private:
    const Draw draw_;
    Phases phase_;
};

void run(void *workspace, const Step *step, bool only_head) {
    auto &memory = *static_cast<Workspace *>(workspace);
    memory.failed.store(0, std::memory_order_relaxed);
    memory.team.run(std::make_shared<StepJob>(memory, *step, only_head));
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

// The ways of ways.h that this library has and this processor grants, and that are not refused.
extern "C" int64_t penstock_ways() {
    int64_t ways = 0;
#if defined(PENSTOCK_TILES)
    for (Way way : {kTilesOfPairs, kTilesOfBytes})
        if (may_use_tiles(way)) ways |= way;
#endif
#if defined(PENSTOCK_PAIRED_ROWS)
    if (may_pair_rows()) ways |= kPairedRows;
#endif
    return ways;
}
extern "C" void penstock_refuse(int64_t ways) { refused_ways = ways; }
extern "C" void penstock_prefetch_for_few(int64_t does) { prefetches_for_few = does; }

// See trial.h.
extern "C" double penstock_try(const Linear *linear, const float *x, int64_t rows, float *y) {
    return try_product(*linear, x, rows, y);
}

// Makes what steps of a model run in, to be freed by penstock_free. The model must outlive it.
extern "C" void *penstock_make(const Model *model, int64_t threads) {
    return new Workspace(*model, threads);
}
extern "C" void penstock_free(void *workspace) { delete static_cast<Workspace *>(workspace); }

// A whole step. If `states` is given, writes the last layer's normalised states and no logits. Returns how many
// experts it has read, over all layers.
extern "C" int64_t penstock_step(void *workspace, const Step *step) {
    run(workspace, step, false);
    return static_cast<Workspace *>(workspace)->routing.num_read();
}

// After a step with drafts, and before the next: of each sequence, how many are right. step: the same.
extern "C" void penstock_accept(void *workspace, const Step *step, const int64_t *accepted) {
    auto &memory = *static_cast<Workspace *>(workspace);
    memory.team.run(std::make_shared<Acceptance>(memory, *step, accepted));
}

// Returns Workspace::failed of the last step.
extern "C" int64_t penstock_failed(void *workspace) {
    return static_cast<Workspace *>(workspace)->failed.load(std::memory_order_acquire);
}

// Only the output layer: the logits of `samples` rows of `states`, in a step without tokens.
extern "C" void penstock_logits(void *workspace, const Step *step) {
    run(workspace, step, true);
}

// Reads what a step needs of the executor's tables.
extern "C" void penstock_gather(const Gather *wanted) { gather(*wanted); }

// Draws an id of each row of logits. A few numbers are not worth waking a thread for.
extern "C" void penstock_draw(void *workspace, const Draw *draw) {
    Team &team = static_cast<Workspace *>(workspace)->team;
    const auto job = std::make_shared<Draws>(*draw, team.size());
    if (draw->rows < 2 || draw->rows * draw->size < 1 << 14) return job->run(0);
    team.run(job);
}

// A step, an id drawn of each of its first draw->rows sequences, a step of these, and so on: nums[row] ids of a row,
// which do not increase, into the token table that `first` reads, and into drafts (rows, nums[0]). It ends where logits
// are invalid.
extern "C" void penstock_draft(void *workspace, const Gather *first, const Step *first_step, const Draw *first_draw,
                               int64_t *token_table, const int64_t *nums, int64_t *drafts) {
    Gather wanted = *first;
    Step step = *first_step;
    Draw draw = *first_draw;
    std::vector<int64_t> lengths(draw.lengths, draw.lengths + draw.rows), starts(draw.rows), rows(draw.rows);
    const std::vector<int64_t> counts(draw.rows, 1);
    std::vector<int32_t> query_starts(draw.rows + 1);
    std::iota(rows.begin(), rows.end(), 0);
    std::iota(query_starts.begin(), query_starts.end(), 0);
    draw.lengths = lengths.data();
    for (int64_t round = 0, most = draw.rows ? nums[0] : 0;; ++round) {
        gather(wanted);
        run(workspace, &step, false);
        penstock_draw(workspace, &draw);
        for (int64_t row = 0; row < draw.rows; ++row) {
            if (draw.ids[row] < 0) return;
            starts[row] = lengths[row]++;
            token_table[draw.slots[row] * wanted.tokens_step + starts[row]] = draw.ids[row];
            drafts[row * most + round] = draw.ids[row];
        }
        while (draw.rows && nums[draw.rows - 1] <= round + 1) --draw.rows;
        if (!draw.rows) return;
        wanted.sequences = wanted.tokens = step.tokens = step.sequences = step.samples = draw.rows;
        wanted.starts = starts.data();
        wanted.counts = counts.data();
        step.query_starts = query_starts.data();
        step.sample_rows = rows.data();
    }
}

// Names what computes products, for people to read: with plain weights, and with codes or null where none can be.
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
