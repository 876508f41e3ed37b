// Python passes these, and engine/native/structures.py reads them here: numbers, pointers, structures declared before,
// and arrays of these.
#pragma once
#include <cstdint>

#include "native/ranks/ranks.h"

using std::int32_t;
using std::int64_t;

struct Linear {
    // (rows, columns), in bands: see products.h, and grouped.h, blocks.h and fp8.h for codes.
    const void *weight;
    const void *bias;    // (rows) or null
    int64_t rows, columns;
    int64_t bits;  // of a code that is an integer, or 0
    int64_t group, offset, has_half_scales;
    const void *scales, *zeros, *table;  // see Grouped
    const int32_t *order;  // (columns) or null: of which column of x each column of the codes is
    int64_t has_minima;  // see Blocks, and for the factors
    const void *factors;
    int64_t factor_columns;
    double unit;
    int64_t is_by_band;  // see Fp8
    int64_t format;      // a number of Formats
};

// ---- Attention ----------------------------------------------------------------------------------

// Layers whose heads are alike share this.
struct Heads {
    int64_t kv_heads, head_dim;
    int64_t rotary_dim;          // of a head's dimensions, those that are rotated: the first
    const float *query_factors;  // (positions) or null: what queries are multiplied by
    int64_t latent_dim;  // values are the first so many numbers of keys; 0: they are stored beside these
};

struct AttentionLayer {
    const float *query_norm, *key_norm;  // null where there is none; of a head, or of all with whole_qk_norm
    Linear qkv[3];  // one or several that are stacked; then without rows
    Linear output;
    // As many numbers as (num_blocks, block_size, num_kv_heads, head_dim), as runs.h or coded_runs.h has them.
    void *keys, *values;
    float *key_scales, *value_scales;  // of codes, else null
    const float *sinks;   // (heads) or null: see put_attended
    int64_t window;       // positions that a token attends to, its own included; 0: all
    const float *cos, *sin;  // (positions, head_dim / 2), or one row for all
    int64_t angles_step;     // the distance between rows; 0 for one row
    int64_t group;           // whose slots and block tables it has
    int64_t heads;           // which of the model's it has
    // How much qkv gives after queries: 2 for keys and values; 1 where values are what keys are made of; 0 where the
    // layer reads those of another.
    int64_t kv_parts;
    int64_t has_gates;  // qkv gives one after each head's query: its sigmoid multiplies what the head has attended to
    int64_t has_spans;  // it reads Step::reaches
    int64_t is_two_sided;  // and a window counts the positions after a token, too
};

// ---- Latent attention ---------------------------------------------------------------------------

// What a layer has besides an AttentionLayer, of which qkv gives queries, or what they are a product of, the latent, and
// the key that all heads share; and the rotation is of this key, and of as much of each query.
struct LatentLayer {
    Linear query;  // without rows where qkv gives queries
    // For each head, of plain weights: to latents of the part of a query that is not rotated, and of latents to values.
    const Linear *to_latents, *to_values;
    const float *query_norm, *latent_norm;
};

// Layers with it are alike in this. latent_dim: 0 where none has it.
struct Latents {
    int64_t latent_dim, rope_dim, nope_dim, value_dim, query_rank, is_interleaved;
    double norm_eps;
};

// ---- Gated delta nets ---------------------------------------------------------------------------

struct DeltaNetLayer {
    // The convolution's inputs and output gates, in one or two; then beta of each value head, and what its decay is
    // made of, in one or two.
    Linear projections[4];
    Linear output;
    // Each key head serves as many value heads, one after the other.
    int64_t num_key_heads, num_value_heads, key_dim, value_dim, num_taps;
    const float *taps;          // (num_taps, channels): of queries, keys and values
    const float *decay, *bias;  // of each value head; decay: -exp(A_log)
    const float *norm;          // (value_dim)
    float *matrices;            // (states, num_value_heads, key_dim, value_dim)
    float *inputs;              // (states, num_taps - 1, channels)
    int64_t group;              // whose block tables have states
};

// ---- MLP ----------------------------------------------------------------------------------------

struct MlpLayer {
    int64_t size;  // 0 where the layer has none
    Linear gate, up, down;  // up: without rows where there is no gate, and the first is the only product
};

// ---- Mixtures of experts ------------------------------------------------------------------------

struct Expert {
    Linear gate, up, down;
};

struct ExpertsLayer {
    const Expert *each;  // null where the layer has none. All have the same format and groups of codes.
    // Both of plain weights; the sigmoid of what the second gives is the weight of the shared expert. Without rows: it
    // is 1, or there is none.
    Linear router[2];
    MlpLayer shared;  // computes every token besides
    const float *router_norm, *input_norm;  // of what router and experts read
    const float *factors;      // (experts) or null: of the weights of a token's experts
    const float *corrections;  // (experts) or null: what is added to weights to choose by
    // These norm what the MLP and the experts give, before both are added, where the layer has an MLP beside them.
    const float *mlp_norm, *output_norm;
};

// Layers with experts: how many they have, how many compute a token, and the size of each. 0 where no layer
// has any. For the others see the class of this name in Python.
struct Experts {
    int64_t num_experts, num_per_token, size, is_normed, has_sigmoids;
    int64_t num_groups, num_groups_used, num_best;
    double weight_factor;
    double swiglu_alpha, swiglu_limit;  // of an activation that is clamped; a limit of 0: it is not
};

// ---- Layers' own inputs -------------------------------------------------------------------------

struct PerLayerInput {
    Linear gate, projection;  // without rows: the layer has no input
    const float *norm;        // of what the projection gives
};

// Makes the layers' own inputs of the embedded tokens: (num_layers * size) of each, times scale, and normalised
// by layer. size: 0 where there are none.
struct PerLayerInputs {
    Linear projection;
    const float *norm;
    int64_t size;
    double scale;
};

// ---- The model ----------------------------------------------------------------------------------

struct Layer {
    // Null where there is none: of what attention reads and gives, and of what the MLP, or the experts, read and give.
    const float *input_norm, *attended_norm, *mlp_norm, *active_norm;
    const float *attended_sum_norm, *active_sum_norm;  // of the residual stream after these were added
    AttentionLayer attention;
    LatentLayer latent;       // with a latent_norm: latent attention
    DeltaNetLayer delta_net;  // in place of attention
    MlpLayer mlp;
    ExpertsLayer experts;
    PerLayerInput input;
    double scalar;  // what the layer's states are multiplied by
};

struct Embedding {
    const void *table;
    int64_t is_in_bands;  // 1 where the output layer shares it, else 0: row by row
    int64_t rows;         // of this rank's part of the vocabulary
    double multiplier;
};

struct Head {
    const float *norm;
    Linear linear;
    double multiplier;
    double softcap;  // logits are softcap * tanh(logit / softcap); 0: they are not
};

// Of a head that drafts: its layer reads a product of an embedded token and the state before it, in this order and each
// normalised. Without rows: the model is none.
struct Merge {
    Linear fc;
    const float *embedded_norm, *state_norm;
};

// Where several ranks have a part of every layer each: what all_reduce takes, how many they are, and the first id of
// this one's part of the vocabulary. group: else null.
struct Ranks {
    void *group;
    AllReduce all_reduce;
    int64_t num, first_id;
};

struct Model {
    int64_t num_layers, hidden, heads, mlp, block_size;  // mlp: of the layer that has the most, a shared expert's too
    const Heads *kinds;
    int64_t num_kinds;
    double eps;
    const Layer *layers;
    int64_t whole_qk_norm, has_post_norms;
    int64_t gelu;  // see Activation
    int64_t is_centred;  // of norms: see NormKind
    int64_t norms_values;  // without a weight
    Latents latents;
    Embedding embedding;
    Head head;
    Experts experts;
    PerLayerInputs inputs;
    Merge merge;
    Ranks ranks;
};

// ---- A step -------------------------------------------------------------------------------------

// A LoRA adapter adds this to a linear layer of a stack, from the band `first` on. Without any: rank 0.
struct LowRank {
    const void *down;  // A, of T: see low_rank.h
    const void *up;    // B: (bands, rank, 32), of T
    int64_t rank, linear, first, bands;  // linear: which of the stack's layers
    double scale;
};

// Those of the stacks of qkv and of a delta net's gates, which are one here, of the output, of gate and up, and of down:
// see kQkv and the others in adapters.h.
struct AdapterLayer {
    LowRank changes[9];
};

// Consecutive tokens with one adapter.
struct AdapterRun {
    int64_t first, tokens;
    const AdapterLayer *layers;
};

struct Step {
    int64_t tokens, sequences, samples, max_blocks;
    const int64_t *token_ids, *positions, *kv_slots, *sample_rows;  // kv_slots: (groups, tokens)
    const int32_t *block_tables, *query_starts;  // (groups, sequences, max_blocks), (sequences + 1)
    float *logits;  // (samples, vocabulary)
    void *states;   // (samples, hidden), of T, or null: see the functions in step.cpp
    const AdapterRun *runs;  // in the order of the tokens
    int64_t num_runs, width;  // width: the most that the ranks of a stack in one of them add up to
    int64_t timeout_ns;       // for how long another rank is waited for
    // (num_snapshots, 3): a sequence, how many of its tokens, and the state that then has a copy of its state.
    const int64_t *snapshots;
    int64_t num_snapshots;
    // (sequences + 1) or null: a sequence's last tokens may be drafts; where they begin, among those of all. What layers
    // with a recurrence make of them is in no state before penstock_accept.
    const int32_t *draft_starts;
    // (tokens, hidden), of T: the normalised states of the last layer, of all tokens, or null; and those that a head
    // that drafts reads.
    void *all_states;
    const void *merged;
    const float *input_rows;  // (tokens, num_layers * inputs.size), added to the layers' own inputs
    // (tokens, hidden), the residual stream: of the stage before, and to the stage after. Where layers have inputs of
    // their own, the embedded tokens follow, (tokens, hidden), of which these are made. Null in the first stage, which
    // embeds, and in the last, which writes states or logits.
    const float *received;
    float *sent;
    // What an encoder has made, (inserts, hidden), in place of embedded tokens: of each token which of them, or -1, null
    // where all are -1. deepstack: (num_deep, inserts, hidden), added after each of the first layers.
    const float *inserted, *deepstack;
    const int64_t *insert_of;
    int64_t inserts, num_deep;
    // (tokens, head_dim / 2) or null: the angles of these tokens, in place of layers' own rows at their positions.
    const float *cos, *sin;
    const int64_t *reaches;  // (tokens) or null: the position after the last that a token attends to
};
