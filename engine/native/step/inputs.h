// What a step reads of the executor's tables: a few microseconds here, and some ten of torch's operators
// otherwise, whose code is cold each time, since a step passes all weights through the caches.
#pragma once
#include <algorithm>
#include <cstdint>

using std::int32_t;
using std::int64_t;

// For each of `sequences`: the row of both tables, its tokens before the step, and how many the step has.
struct Gather {
    int64_t sequences, tokens_step, max_blocks, block_size;
    const int64_t *slots, *starts, *counts;
    const int64_t *token_table;   // (slots, tokens_step)
    const int32_t *block_tables;  // (groups, slots_of_group, max_blocks)
    int64_t *token_ids, *positions, *kv_slots;  // of all tokens, sequence after sequence
    int32_t *blocks;              // (sequences, max_blocks), written as far as used
    // The block tables, and what is made of them, are there once for each group of layers.
    int64_t groups, slots_of_group, tokens;
};

// As build_model_input in engine/step/model_input.py.
inline void gather(const Gather &g) {
    int64_t to = 0;
    for (int64_t i = 0; i < g.sequences; ++i) {
        const int64_t *tokens = g.token_table + g.slots[i] * g.tokens_step;
        const int32_t *blocks = g.block_tables + g.slots[i] * g.max_blocks;
        const int64_t used = (g.starts[i] + g.counts[i] + g.block_size - 1) / g.block_size;
        for (int64_t group = 0; group < g.groups; ++group) {
            const int32_t *of_group = blocks + group * g.slots_of_group * g.max_blocks;
            int64_t *slots = g.kv_slots + group * g.tokens + to - g.starts[i];
            for (int64_t p = g.starts[i]; p < g.starts[i] + g.counts[i]; ++p)
                slots[p] = of_group[p / g.block_size] * g.block_size + p % g.block_size;
            std::copy_n(of_group, used, g.blocks + (group * g.sequences + i) * g.max_blocks);
        }
        for (int64_t p = g.starts[i]; p < g.starts[i] + g.counts[i]; ++p, ++to) {
            g.token_ids[to] = tokens[p];
            g.positions[to] = p;
        }
    }
}
