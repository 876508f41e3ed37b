// Attention to the keys and values of the paged pool, between its two products.
#pragma once
#include <cmath>

#include "native/attention/attention.h"
#include "native/step/context.h"

namespace {

class AttentionPhases : PartPhases {
  public:
    explicit AttentionPhases(StepContext &context)
        : PartPhases(context), kinds_(m_.kinds, m_.kinds + m_.num_kinds) {
        if (m_.ranks.group) squares_ = state_.workspace.squares.reserve(s_.tokens * 2);
        if (m_.latents.latent_dim) latents_ = state_.workspace.latents.reserve((s_.tokens + kSpare) * latents_step());
        plan();
    }

    void run(StepThread &thread, int64_t index) {
        const AttentionLayer &layer = m_.layers[index].attention;
        multiply_qkv(thread, index);
        if (m_.whole_qk_norm) normalise_whole(thread, index);
        const Kind &kind = kinds_[layer.heads];
        if (kind.keys_first && layer.kv_parts)
            thread.run(s_.tokens, [&](int64_t t) {
                for (int64_t h = 0; h < kind.kv_heads; ++h) store_keys(thread.worker, layer, t, h);
            });
        attend(thread, layer);
        linears_.multiply_and_add(thread, layer.output, {state_.x, state_.x_step}, state_.mixed,
                                  state_.attended_size, {index, kOutput});
    }

    // For latent attention, which has stored the keys, and written queries to latents(): in place of these comes what
    // the heads have attended to, as rows of X.
    void attend(StepThread &thread, const AttentionLayer &layer) {
        const Kind &kind = kinds_[layer.heads];
        const int64_t units = int64_t(kind.units.size()) * kind.kv_heads / kind.heads_each;
        thread.run(units, [&](int64_t unit) {
            const int64_t first = unit * kind.heads_each;
            for (int64_t i = first; i < first + kind.heads_each; ++i) attend(thread.worker, layer, i);
        });
    }
    void multiply_qkv(StepThread &thread, int64_t index) {
        const Layer &layer = m_.layers[index];
        linears_.multiply_normalised(thread, layer.input_norm, layer.attention.qkv, 3, {index, kQkv},
                                     [&](int64_t t, int64_t n, const float *y, int64_t count) {
                                         std::copy_n(y, count, state_.wide + t * state_.qkv_size + n);
                                     });
    }
    void store_latent(Worker &worker, const AttentionLayer &layer, int64_t t, const float *key) {
        const HeadKeys to = {&layer, places(kinds_[layer.heads]), 0, nullptr};
        const int64_t slot = s_.kv_slots[layer.group * s_.tokens + t];
        worker.attention[layer.heads]->put(to, slot, key, {nullptr, nullptr, 0, 1.0f}, nullptr, 1.0f);
    }
    // (tokens, heads, latent_dim + rope_dim).
    float *latents(int64_t t, int64_t head) const {
        return latents_ + t * latents_step() + head * (m_.latents.latent_dim + m_.latents.rope_dim);
    }
    // Rows a multiple of 4 KiB apart would share few cache lines.
    int64_t latents_step() const { return m_.heads * (m_.latents.latent_dim + m_.latents.rope_dim) + 16; }

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
    int64_t group(const Kind &kind) const { return m_.heads / kind.kv_heads; }  // heads of a KV head
    int64_t attended(const Kind &kind) const { return m_.heads * kind.head_dim; }  // numbers of all heads
    int64_t part_floats(const Kind &kind) const {
        return Gathered::floats(group(kind), banded_rows(value_dim(kind)));
    }

    void normalise_whole(StepThread &thread, int64_t index) {
        const AttentionLayer &layer = m_.layers[index].attention;
        if (m_.ranks.group) {
            thread.run(s_.tokens, [&](int64_t t) { measure_heads(kinds_[layer.heads], t); });
            sums_.add(thread, index, squares_, s_.tokens * 2);
        }
        thread.run(s_.tokens, [&](int64_t t) { normalise_heads(layer, t); });
    }
    // The queries and keys of a token, each over all heads, those of other ranks too.
    void normalise_heads(const AttentionLayer &layer, int64_t t) {
        const Kind &kind = kinds_[layer.heads];
        const int64_t queries = attended(kind), keys = kind.kv_heads * kind.head_dim;
        float *query = state_.wide + t * state_.qkv_size, *key = query + queries;
        if (m_.ranks.group) {
            const float ranks = float(m_.ranks.num);
            multiply_by(query, layer.query_norm, queries, squares_[2 * t] / ranks, float(m_.eps), query);
            multiply_by(key, layer.key_norm, keys, squares_[2 * t + 1] / ranks, float(m_.eps), key);
            return;
        }
        norms_.normalise(query, layer.query_norm, queries, query);
        norms_.normalise(key, layer.key_norm, keys, key);
    }
    // Measures what the other ranks need to know for that. Each has as many heads; one that several have counts equally
    // often as another.
    void measure_heads(const Kind &kind, int64_t t) {
        const float *query = state_.wide + t * state_.qkv_size;
        squares_[2 * t] = mean_square(query, attended(kind));
        squares_[2 * t + 1] = mean_square(query + attended(kind), kind.kv_heads * kind.head_dim);
    }

    // A head as it is rotated: normalised before if the model does so.
    const float *normed(Worker &worker, const Kind &kind, const float *head, const float *norm) {
        if (!norm || m_.whole_qk_norm) return head;
        norms_.normalise(head, norm, kind.head_dim, worker.head.get());
        return worker.head.get();
    }
    Rotation rotation(const AttentionLayer &layer, const Kind &kind, int64_t t, float factor) const {
        const int64_t half = kind.latent_dim ? 0 : kind.rotary_dim / 2;  // its queries are rotated
        const int64_t own = t * (kind.head_dim / 2), angles = s_.positions[t] * layer.angles_step;
        if (s_.cos) return {s_.cos + own, s_.sin + own, half, factor};
        return {layer.cos + angles, layer.sin + angles, half, factor};
    }

    void plan() {
        int64_t floats = 0, counters = 0;
        for (Kind &kind : kinds_) {
            const int64_t parts = plan(kind) * kind.kv_heads;
            floats = std::max(floats, parts * part_floats(kind));
            counters = std::max(counters, parts);
        }
        parts_ = state_.workspace.parts.reserve(floats);
        if (counters) arrived_.reset(new std::atomic<int32_t>[counters]());
    }
    // The number of parts that the units give.
    int64_t plan(Kind &kind) {
        const int64_t tile = std::max<int64_t>(1, kQueries / group(kind));
        int64_t parts = 0;
        for (int64_t i = 0; i < s_.sequences; ++i) {
            const int64_t first = s_.query_starts[i], end = s_.query_starts[i + 1];
            kind.keys_first |= end - first > tile || s_.reaches;
            const int64_t pieces = end == first ? 0 : s_.positions[end - 1] / places(kind).piece() + 1;
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
        if (int64_t(kind.units.size()) >= 8 * state_.workspace.team.size()) kind.heads_each = kind.kv_heads;
        return parts;
    }

    KEEP_APART void store_keys(Worker &worker, const AttentionLayer &layer, int64_t t, int64_t kv_head) {
        const Kind &kind = kinds_[layer.heads];
        const int64_t d = kind.head_dim;
        const int64_t queries = attended(kind) * (1 + layer.has_gates);
        const float *key = state_.wide + t * state_.qkv_size + queries + kv_head * d;
        const float *value = key + (layer.kv_parts - 1) * kind.kv_heads * d;
        float factor = 1.0f;
        if (m_.norms_values) factor = 1.0f / std::sqrt(mean_square(value, d) + float(m_.eps));
        const HeadKeys to = {&layer, places(kind), kv_head, nullptr};
        worker.attention[layer.heads]->put(to, s_.kv_slots[layer.group * s_.tokens + t],
                                        normed(worker, kind, key, layer.key_norm),
                                        rotation(layer, kind, t, 1.0f), value, factor);
    }

    // Its gate follows, where it has one.
    const float *query_of(const AttentionLayer &layer, const Kind &kind, int64_t t, int64_t head) const {
        if (kind.latent_dim) return latents(t, head);
        return state_.wide + t * state_.qkv_size + head * kind.head_dim * (1 + layer.has_gates);
    }
    KVPlaces places(const Kind &kind) const {
        return {m_.block_size, kind.kv_heads, kind.head_dim, kind.latent_dim};
    }
    HeadKeys keys_of(const AttentionLayer &layer, const Kind &kind, const Unit &unit, int64_t kv_head) {
        const int64_t row = layer.group * s_.sequences + unit.sequence;
        return {&layer, places(kind), kv_head, s_.block_tables + row * s_.max_blocks};
    }
    Rows rows_of(const AttentionLayer &layer, const Kind &kind, const Unit &unit) {
        const int64_t *reaches = s_.reaches && layer.has_spans ? s_.reaches + unit.first : nullptr;
        const int64_t ahead = reaches && layer.is_two_sided ? layer.window : 0;
        return {s_.positions[unit.first], unit.tokens, group(kind), layer.window, reaches, ahead};
    }

    // The positions that a head of a unit attends to first; none behind the last unit.
    Positions first_positions(const AttentionLayer &layer, const Kind &kind, int64_t index) {
        const bool is_one = index < int64_t(kind.units.size()) * kind.kv_heads;
        const Unit &unit = kind.units[is_one ? index / kind.kv_heads : 0];
        const HeadKeys keys = keys_of(layer, kind, unit, index % kind.kv_heads);
        if (!is_one) return {keys, 0, 0};
        const Rows rows = rows_of(layer, kind, unit);
        return first_of(keys, rows, std::max<int64_t>(unit.piece, 0));
    }

    KEEP_APART void attend(Worker &worker, const AttentionLayer &layer, int64_t index) {
        const Kind &kind = kinds_[layer.heads];
        const Unit &unit = kind.units[index / kind.kv_heads];
        const int64_t kv_head = index % kind.kv_heads, group = this->group(kind);
        const Positions next = first_positions(layer, kind, index + 1);
        Attention &attention = *worker.attention[layer.heads];
        const HeadKeys keys = keys_of(layer, kind, unit, kv_head);
        const Rows rows = rows_of(layer, kind, unit);
        const bool is_last = unit.piece == kAll || unit.piece == unit.pieces - 1;
        for (int64_t t = 0; t < unit.tokens; ++t) {
            const int64_t position = s_.positions[unit.first + t];
            const float factor = kind.query_factors ? kind.query_factors[position] : 1.0f;
            if (!kind.keys_first && is_last && layer.kv_parts)
                store_keys(worker, layer, unit.first + t, kv_head);
            const Rotation by = rotation(layer, kind, unit.first + t, factor);
            for (int64_t g = 0; g < group; ++g) {
                const float *query = query_of(layer, kind, unit.first + t, kv_head * group + g);
                attention.put_query(t * group + g, normed(worker, kind, query, layer.query_norm), by);
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

    void put_attended(const Gathered &all_rows, const Unit &unit, int64_t kv_head, const AttentionLayer &layer,
                      const Kind &kind) {
        const int64_t d = value_dim(kind), step = banded_rows(d), group = this->group(kind);
        for (int64_t row = 0; row < unit.tokens * group; ++row) {
            const int64_t token = unit.first + row / group;
            const int64_t head = kv_head * group + row % group, column = head * d;
            float *mixed = all_rows.mixed + row * step;
            float weight = all_rows.weight[row];
            // A sink is one score more, whose value is 0: once, after all pieces.
            if (layer.sinks)
                weight += std::exp(layer.sinks[head] - all_rows.peak[row]);
            if (kind.latent_dim) {
                divide_to_x(mixed, weight, d, latents(token, head));
                continue;
            }
            if (layer.has_gates) multiply_by_sigmoid(query_of(layer, kind, token, head) + d, d, mixed);
            if (is_coded(layer.output))
                divide(mixed, weight, d, state_.mixed + token * state_.attended_size + column);
            else
                divide_to_x(mixed, weight, d, state_.x + token * state_.x_step + column * kActivationBytes);
        }
    }

    std::vector<Kind> kinds_;
    std::unique_ptr<std::atomic<int32_t>[]> arrived_;
    float *parts_ = nullptr, *squares_ = nullptr, *latents_ = nullptr;
};

}  // namespace
