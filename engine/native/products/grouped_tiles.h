// Products with codes by tiles of AMX: 16 rows with 16 columns, up to 64 numbers along k in one instruction.
//
// A group's products are whole numbers, and their sums are added to a result as grouped.h does: so the bits are
// the same as those of vectors, and few rows may go there and many here.
#pragma once
#include <string>

#include "grouped.h"
#include "tiles.h"

#if defined(PENSTOCK_TILES)

// With fewer rows vectors compute as fast as memory brings the weights.
constexpr int64_t kFewestTileRows = 8;
constexpr int64_t kMostTileBytes = 64;
// A group is multiplied in at most two steps of one length, so that one shape of tiles is enough. One of less
// than half a tile would take vectors longer than it saves them.
constexpr int64_t kLeastTileGroup = 32, kMostTileGroup = 2 * kMostTileBytes;
// So much of a band is multiplied in one go, by all rows: its bytes, 32 rows' codes and what they add up to
// stay in the nearest cache.
constexpr int64_t kTileBlock = 512;
static_assert(kTileBlock >= kMostTileGroup);

using TileSums = std::int32_t[2 * kTile][kBand];

// A group of M tiles of 16 rows. Tiles are as shape_tiles says: C in 0 to 3, x in 4 and 5, w in 6 and 7.
template <int M>
inline void add_up_group(const std::int8_t *x, int64_t x_step, const unsigned char *w,
                         int64_t group, int64_t depth, TileSums &sums) {
    constexpr int64_t kRow = 4 * kBand, kRight = 4 * kTile;
    tile_zero<0>(), tile_zero<1>();
    if constexpr (M == 2) tile_zero<2>(), tile_zero<3>();
    for (int64_t k = 0; k < group; k += depth, x += depth, w += depth * kBand) {
        tile_load<4>(x, x_step);
        tile_load<6>(w, kRow), tile_load<7>(w + kRight, kRow);
        tile_multiply_quads<0, 4, 6>(), tile_multiply_quads<1, 4, 7>();
        if constexpr (M == 2) {
            tile_load<5>(x + kTile * x_step, x_step);
            tile_multiply_quads<2, 5, 6>(), tile_multiply_quads<3, 5, 7>();
        }
    }
    tile_store<0>(sums[0], kRow), tile_store<1>(sums[0] + kTile, kRow);
    if constexpr (M == 2) tile_store<2>(sums[kTile], kRow), tile_store<3>(sums[kTile] + kTile, kRow);
}

template <bool kZeros>
inline void put_group(const TileSums &dots, const CodedRows &x, int64_t row, int64_t rows,
                      const Grouped &w, int64_t band, int64_t g, float *c, int64_t c_step) {
    constexpr int V = kBand / kLanes;
    Floats scale[V], zero[V];
    for (int j = 0; j < V; ++j) {
        const int64_t lane = (band * w.groups + g) * kBand + j * kLanes;
        scale[j] = w.scales_at(lane);
        zero[j] = kZeros ? w.zeros_at(lane) : Floats{};
    }
    const std::int32_t *sums = x.sums(row) + g, offset = std::int32_t(w.offset);
    const float *x_scales = x.scales(row) + g;
    const int64_t step4 = x.step / 4;
    for (int64_t i = 0; i < rows; ++i, c += c_step) {
        const Ints begin = kZeros ? Ints{} : every(sums + i * step4) * -offset;
        const float sum = float(sums[i * step4]), x_scale = x_scales[i * step4];
#pragma GCC unroll 8
        for (int j = 0; j < V; ++j) {
            const Ints dot = begin + *reinterpret_cast<const Ints *>(dots[i] + j * kLanes);
            store(c + j * kLanes,
                  with_group<kZeros>(load(c + j * kLanes), __builtin_convertvector(dot, Floats), sum, zero[j],
                                     scale[j], x_scale));
        }
    }
}

// Some groups of a band, whose codes are bytes here. While vectors take what tiles have added up of a group, tiles
// are busy with the next.
template <int M>
__attribute__((noinline)) void
multiply_groups_by_tiles(const CodedRows &x, int64_t row, int64_t rows, const Grouped &w,
                         const unsigned char *bytes, int64_t depth, bool prefetches, int64_t band,
                         int64_t first, int64_t last, float *c, int64_t c_step) {
    alignas(64) TileSums sums[2];
    const auto put = [&](int64_t g) {
        if (w.zeros)
            put_group<true>(sums[g % 2], x, row, rows, w, band, g, c, c_step);
        else
            put_group<false>(sums[g % 2], x, row, rows, w, band, g, c, c_step);
    };
    for (int64_t g = first; g < last; ++g, bytes += w.group * kBand) {
        if (prefetches)
            for (int64_t line = 0; line < w.group * kBand; line += 64)
                __builtin_prefetch(bytes + kPrefetchBytes + line, 0, 2);
        add_up_group<M>(x.codes(row) + g * w.group, x.step, bytes, w.group, depth, sums[g % 2]);
        if (g > first) put(g - 1);
    }
    put(last - 1);
}

inline bool may_multiply_by_tiles(int64_t rows, const Grouped &w) {
    return rows >= kFewestTileRows && w.group >= kLeastTileGroup && w.group <= kMostTileGroup &&
           may_use_tiles(kTilesOfBytes);
}

// As multiply_grouped. x has room for whole tiles of 16 rows.
inline void multiply_grouped_by_tiles(const CodedRows &x, int64_t row, int64_t rows,
                                      const Grouped &w, int64_t band, float *c, int64_t c_step) {
    alignas(64) unsigned char widened[kTileBlock * kBand];
    for (int64_t i = 0; i < rows; ++i) std::fill_n(c + i * c_step, kBand, 0.0f);
    const int64_t depth = w.group > kMostTileBytes ? w.group / 2 : w.group;
    const int64_t block = kTileBlock / w.group;
    shape_tiles(depth);
    for (int64_t g = 0; g < w.groups; g += block) {
        const int64_t last = std::min(g + block, w.groups);
        const unsigned char *bytes = w.codes + (band * w.groups + g) * w.group_bytes();
        if (w.bits == 4) {
            widen_nibbles(bytes, (last - g) * w.group, w.table, widened);
            bytes = widened;
        }
        for (int64_t i = 0; i < rows; i += 2 * kTile) {
            const auto multiply =
                rows - i > kTile ? multiply_groups_by_tiles<2> : multiply_groups_by_tiles<1>;
            multiply(x, row + i, std::min(rows - i, 2 * kTile), w, bytes, depth,
                     i == 0 && w.bits == 8, band, g, last, c + i * c_step, c_step);
        }
    }
}

#endif

// By the best that this processor has. x has room for whole tiles of 16 rows.
inline void multiply_codes(const CodedRows &x, int64_t row, int64_t rows, const Grouped &w, int64_t band,
                           float *c, int64_t c_step) {
#if defined(PENSTOCK_TILES)
    if (may_multiply_by_tiles(rows, w))
        return multiply_grouped_by_tiles(x, row, rows, w, band, c, c_step);
#endif
    multiply_grouped(x, row, rows, w, band, c, c_step);
}
// Names what computes that, for people to read.
inline std::string grouped_products() {
#if defined(PENSTOCK_TILES)
    if (may_use_tiles(kTilesOfBytes)) return "AMX tiles of bytes, or " + code_instructions();
#endif
    return code_instructions();
}
