// Products of bfloat16 by tiles (amx.h): of 16 rows with 16 columns, 32 numbers along k in one instruction.
#pragma once
#include <algorithm>
#include <cstring>

#include "amx.h"
#include "vectors.h"
#include "ways.h"

#if defined(PENSTOCK_TILES)

constexpr int64_t kTile = 16;   // rows of a tile
constexpr int64_t kDepth = 32;  // numbers of bfloat16 in a row

// Bytes along k that the tiles of this thread have, or 0 if they are released.
inline constinit thread_local int64_t tile_depth_bytes = 0;

// Tiles 0 to 3 take sums, 16 x 16 words; 4 and 5 rows of x, 16 x `bytes`; 6 and 7 as much of the columns
// of w. Their contents are lost, if they had another shape.
inline void shape_tiles(int64_t bytes) {
    if (tile_depth_bytes == bytes) return;
    tile_depth_bytes = bytes;
    alignas(64) unsigned char config[64] = {1};  // the palette
    for (int i = 0; i < 8; ++i) {
        config[16 + 2 * i] = (unsigned char)(i == 4 || i == 5 ? bytes : 64);
        config[48 + i] = (unsigned char)(i < 6 ? kTile : bytes / 4);
    }
    configure_tiles(config);
}
inline void end_tiles() {
    tile_depth_bytes = 0;
    release_tiles();
}

// Two columns of 16 weights, each in pairs along k; `step` numbers from pair to pair.
struct TileColumns {
    const bf16 *left, *right;
    int64_t step;
};

// What is fetched meanwhile: so many lines of 64 bytes for each product of tiles.
struct Ahead {
    const char *at = nullptr;
    int64_t lines = 0;
};

// As multiply_band in products.h, of M tiles of 16 rows: C in tiles 0 to 3, x in 4 and 5, w in 6 and 7.
template <int M>
inline void multiply_tiles(const bf16 *x, int64_t x_step, const TileColumns &w, int64_t length,
                           bool is_first, float *c, int64_t c_step, Ahead ahead) {
    const int64_t c_bytes = 4 * c_step;
    if (is_first) {
        tile_zero<0>(), tile_zero<1>();
        if constexpr (M == 2) tile_zero<2>(), tile_zero<3>();
    } else {
        tile_load<0>(c, c_bytes), tile_load<1>(c + kTile, c_bytes);
        if constexpr (M == 2)
            tile_load<2>(c + kTile * c_step, c_bytes),
                tile_load<3>(c + kTile * c_step + kTile, c_bytes);
    }
    auto multiply = [&](const bf16 *from, int64_t from_bytes, const TileColumns &at) {
        tile_load<4>(from, from_bytes);
        tile_load<6>(at.left, 2 * at.step), tile_load<7>(at.right, 2 * at.step);
        tile_multiply_pairs<0, 4, 6>(), tile_multiply_pairs<1, 4, 7>();
        if constexpr (M == 2) {
            tile_load<5>(reinterpret_cast<const char *>(from) + kTile * from_bytes, from_bytes);
            tile_multiply_pairs<2, 5, 6>(), tile_multiply_pairs<3, 5, 7>();
        }
    };
    int64_t k = 0;
    for (; k + kDepth <= length; k += kDepth) {
        const int64_t at = k / 2 * w.step;
        for (int64_t i = 0; i < ahead.lines; ++i, ahead.at += 64) __builtin_prefetch(ahead.at, 0, 2);
        multiply(x + k, 2 * x_step, {w.left + at, w.right + at, w.step});
    }
    if (k < length) {  // the rest, filled up with zeros on both sides
        alignas(64) bf16 rest[M * kTile][kDepth] = {}, weights[2][kTile * kDepth] = {};
        for (int64_t i = 0; i < M * kTile; ++i)
            std::copy_n(x + i * x_step + k, length - k, rest[i]);
        for (int64_t pair = 0; pair < (length - k) / 2; ++pair) {
            const int64_t at = (k / 2 + pair) * w.step;
            std::copy_n(w.left + at, kDepth, weights[0] + pair * kDepth);
            std::copy_n(w.right + at, kDepth, weights[1] + pair * kDepth);
        }
        multiply(rest[0], sizeof rest[0], {weights[0], weights[1], kDepth});
    }
    tile_store<0>(c, c_bytes), tile_store<1>(c + kTile, c_bytes);
    if constexpr (M == 2)
        tile_store<2>(c + kTile * c_step, c_bytes),
            tile_store<3>(c + kTile * c_step + kTile, c_bytes);
}

// next: `length` / 32 times as many lines as lie there are fetched, evenly over all rows.
inline void multiply_by_tiles(const bf16 *x, int64_t x_step, int64_t rows, const TileColumns &w, int64_t length,
                              bool is_first, float *c, int64_t c_step, Ahead next = {}) {
    shape_tiles(2 * kDepth);
    const int64_t parts = (rows + 2 * kTile - 1) / (2 * kTile), lines = (next.lines + parts - 1) / parts;
    for (int64_t row = 0; row < rows; row += 2 * kTile) {
        const auto multiply = rows - row > kTile ? multiply_tiles<2> : multiply_tiles<1>;
        multiply(x + row * x_step, x_step, w, length, is_first, c + row * c_step, c_step, {next.at, lines});
        next.at += length / kDepth * lines * 64;
    }
}

inline void multiply_band_by_tiles(const bf16 *x, int64_t x_step, int64_t rows, const bf16 *w,
                                   int64_t length, bool is_first, float *c, int64_t c_step) {
    const TileColumns columns = {w, w + 2 * kTile, 4 * kTile};
    // The next band comes while this one is multiplied: waited for, it would take longer than the products.
    const Ahead next = {reinterpret_cast<const char *>(w + 2 * kTile * length), kDepth * 2 * kTile * 2 / 64};
    multiply_by_tiles(x, x_step, rows, columns, length, is_first, c, c_step, next);
}

inline bool may_use_tiles(Way way = kTilesOfPairs) {
    static const bool are_granted = tiles_are_granted();
    return are_granted && !is_refused(way);
}

// Released at the end, so that a switch between threads does not save 8 KiB.
class TileScope {
  public:
    TileScope() = default;
    ~TileScope() {
        if (tile_depth_bytes) end_tiles();
    }
    TileScope(const TileScope &) = delete;
};

#else

struct TileScope {};

#endif
