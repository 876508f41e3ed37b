// Tiles of AMX: products of 16 rows of bfloat16 with 16 columns, 32 numbers along k in one instruction.
//
// The operating system grants their use to a process that asks for it; each thread then holds a TileScope
// while it multiplies. Source: Intel 64 and IA-32 Software Developer's Manual, volume 1, chapter 18.
// PENSTOCK_EMULATE_TILES computes the same, slowly, on any processor, for tests.
#pragma once
#include <algorithm>
#include <cstring>

#include "vectors.h"

#if defined(__AMX_BF16__) || defined(PENSTOCK_EMULATE_TILES)
#define PENSTOCK_TILES 1
#endif

#if defined(PENSTOCK_TILES)

constexpr int64_t kTile = 16;   // rows of a tile
constexpr int64_t kDepth = 32;  // numbers of bfloat16 in a row

#if defined(PENSTOCK_EMULATE_TILES)

inline bool tiles_are_granted() { return true; }
inline void begin_tiles() {}
inline void end_tiles() {}
struct Tile {
    std::uint32_t words[kTile][kTile];
};
inline thread_local Tile tiles[8];
template <int I> inline void tile_zero() { tiles[I] = {}; }
template <int I> inline void tile_load(const void *from, int64_t step_bytes) {
    for (int64_t i = 0; i < kTile; ++i)
        std::memcpy(tiles[I].words[i], static_cast<const char *>(from) + i * step_bytes, 64);
}
template <int I> inline void tile_store(void *to, int64_t step_bytes) {
    for (int64_t i = 0; i < kTile; ++i)
        std::memcpy(static_cast<char *>(to) + i * step_bytes, tiles[I].words[i], 64);
}
template <int C, int A, int B> inline void tile_multiply() {
    auto half = [](std::uint32_t word, int i) {
        return std::bit_cast<float>(i ? word & 0xffff0000u : word << 16);
    };
    for (int64_t m = 0; m < kTile; ++m)
        for (int64_t n = 0; n < kTile; ++n) {
            float sums[2] = {};
            for (int64_t k = 0; k < kTile; ++k)
                for (int i = 0; i < 2; ++i)
                    sums[i] = std::fma(half(tiles[A].words[m][k], i),
                                       half(tiles[B].words[k][n], i), sums[i]);
            float total = std::bit_cast<float>(tiles[C].words[m][n]) + (sums[0] + sums[1]);
            tiles[C].words[m][n] = std::bit_cast<std::uint32_t>(total);
        }
}

#else

#include <sys/syscall.h>
#include <unistd.h>

// The system may not know them, or a sandbox may forbid to ask.
inline bool tiles_are_granted() {
    constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
}

// All eight tiles are 16 rows of 64 bytes. The clobbers, here and below, keep the compiler from moving
// reads and writes of memory across.
inline void begin_tiles() {
    alignas(64) unsigned char config[64] = {1};  // the palette
    for (int i = 0; i < 8; ++i) {
        config[16 + 2 * i] = 64;  // bytes in a row, of two bytes
        config[48 + i] = 16;      // rows
    }
    asm volatile("ldtilecfg %0" ::"m"(config) : "memory");
}
inline void end_tiles() { asm volatile("tilerelease" ::: "memory"); }

template <int I> inline void tile_zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(I));
}
template <int I> inline void tile_load(const void *from, int64_t step_bytes) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(step_bytes), "i"(I) : "memory");
}
template <int I> inline void tile_store(void *to, int64_t step_bytes) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(step_bytes), "i"(I) : "memory");
}
template <int C, int A, int B> inline void tile_multiply() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

#endif

// Two columns of 16 weights, each in pairs along k; `step` numbers from pair to pair.
struct TileColumns {
    const bf16 *left, *right;
    int64_t step;
};

// As multiply_band in products.h, of M tiles of 16 rows: C in tiles 0 to 3, x in 4 and 5, w in 6 and 7.
template <int M>
inline void multiply_tiles(const bf16 *x, int64_t x_step, const TileColumns &w, int64_t length,
                           bool is_first, float *c, int64_t c_step) {
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
        tile_multiply<0, 4, 6>(), tile_multiply<1, 4, 7>();
        if constexpr (M == 2) {
            tile_load<5>(reinterpret_cast<const char *>(from) + kTile * from_bytes, from_bytes);
            tile_multiply<2, 5, 6>(), tile_multiply<3, 5, 7>();
        }
    };
    int64_t k = 0;
    for (; k + kDepth <= length; k += kDepth) {
        const int64_t at = k / 2 * w.step;
        for (int64_t row = 0; row < kTile; ++row) {
            __builtin_prefetch(w.left + at + row * w.step + 4096, 0, 2);
            __builtin_prefetch(w.right + at + row * w.step + 4096, 0, 2);
        }
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

inline void multiply_by_tiles(const bf16 *x, int64_t x_step, int64_t rows, const TileColumns &w,
                              int64_t length, bool is_first, float *c, int64_t c_step) {
    int64_t row = 0;
    for (; row + kTile < rows; row += 2 * kTile)
        multiply_tiles<2>(x + row * x_step, x_step, w, length, is_first, c + row * c_step, c_step);
    if (row < rows)
        multiply_tiles<1>(x + row * x_step, x_step, w, length, is_first, c + row * c_step, c_step);
}

inline void multiply_band_by_tiles(const bf16 *x, int64_t x_step, int64_t rows, const bf16 *w,
                                   int64_t length, bool is_first, float *c, int64_t c_step) {
    const TileColumns columns = {w, w + 2 * kTile, 4 * kTile};
    multiply_by_tiles(x, x_step, rows, columns, length, is_first, c, c_step);
}

// Whether a product with a rest along k comes out right: what is emulated, or new, is tried first.
inline bool tiles_are_right() {
    constexpr int64_t rows = 2 * kTile, length = kDepth + 6;
    bf16 x[rows * length], w[length * 32];
    for (int64_t i = 0; i < rows * length; ++i) store(x + i, float(i * 7 % 13) - 6);
    for (int64_t i = 0; i < length * 32; ++i) store(w + i, float(i * 5 % 11) - 5);
    float c[rows * 32];
    begin_tiles();
    multiply_band_by_tiles(x, length, rows, w, length, true, c, 32);
    end_tiles();
    for (int64_t i = 0; i < rows; ++i)
        for (int64_t n = 0; n < 32; ++n) {
            float sum = 0;  // of whole numbers, so exact in any order
            for (int64_t k = 0; k < length; ++k)
                sum += widen(x[i * length + k]) * widen(w[k / 2 * 64 + n * 2 + k % 2]);
            if (c[i * 32 + n] != sum) return false;
        }
    return true;
}

inline bool may_use_tiles() {
    static const bool may = tiles_are_granted() && tiles_are_right();
    return may;
}

// Released at the end, so that a switch between threads does not save 8 KiB.
class TileScope {
  public:
    TileScope() {
        if (may_use_tiles()) begin_tiles();
    }
    ~TileScope() {
        if (may_use_tiles()) end_tiles();
    }
    TileScope(const TileScope &) = delete;
};

#else

struct TileScope {};

#endif
