// What amx.h has of AMX, in plain C++ for any processor: to be included before all else (-include).
//
// Ends the program where a processor would refuse an instruction: without a configuration, or for tiles whose
// shapes do not fit. Source: Intel 64 and IA-32 Software Developer's Manual, volume 2, TDPBF16PS and TDPBSUD.
#pragma once
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#define PENSTOCK_TILES 1

namespace emulated {

struct Tile {
    int rows = 0, bytes = 0;  // bytes: of a row
    std::uint32_t words[16][16];
};
inline thread_local Tile tiles[8];

inline void require(bool is_met, const char *what) {
    if (is_met) return;
    std::fprintf(stderr, "emulated AMX: %s\n", what);
    std::abort();
}
inline Tile &configured(int index) {
    require(tiles[index].rows, "a tile is used that is not configured");
    return tiles[index];
}
inline void require_fit(const Tile &c, const Tile &a, const Tile &b) {
    require(c.rows == a.rows && c.bytes == b.bytes && a.bytes == 4 * b.rows,
            "tiles are multiplied whose shapes do not fit");
}

}  // namespace emulated

inline bool tiles_are_granted() { return true; }
inline void configure_tiles(const unsigned char (&config)[64]) {
    using namespace emulated;
    require(config[0] == 1, "there is only palette 1");
    for (int i = 0; i < 8; ++i) {
        Tile &tile = tiles[i] = {};
        tile.bytes = config[16 + 2 * i] + 256 * config[17 + 2 * i];
        tile.rows = config[48 + i];
        require(tile.rows <= 16 && tile.bytes <= 64 && tile.bytes % 4 == 0, "a tile is too large");
    }
}
inline void release_tiles() {
    for (emulated::Tile &tile : emulated::tiles) tile = {};
}

template <int I> inline void tile_zero() {
    std::memset(emulated::configured(I).words, 0, sizeof emulated::tiles[I].words);
}
// What is loaded beyond the tile's rows and columns is 0.
template <int I> inline void tile_load(const void *from, std::int64_t step_bytes) {
    emulated::Tile &tile = emulated::configured(I);
    std::memset(tile.words, 0, sizeof tile.words);
    for (int row = 0; row < tile.rows; ++row)
        std::memcpy(tile.words[row], static_cast<const char *>(from) + row * step_bytes, tile.bytes);
}
template <int I> inline void tile_store(void *to, std::int64_t step_bytes) {
    const emulated::Tile &tile = emulated::configured(I);
    for (int row = 0; row < tile.rows; ++row)
        std::memcpy(static_cast<char *>(to) + row * step_bytes, tile.words[row], tile.bytes);
}
// The first numbers of all pairs are added up, and the second ones, and then both.
template <int C, int A, int B> inline void tile_multiply_pairs() {
    emulated::Tile &c = emulated::configured(C);
    const emulated::Tile &a = emulated::configured(A), &b = emulated::configured(B);
    emulated::require_fit(c, a, b);
    const auto half = [](std::uint32_t word, int i) {
        return std::bit_cast<float>(i ? word & 0xffff0000u : word << 16);
    };
    for (int m = 0; m < c.rows; ++m)
        for (int n = 0; n < c.bytes / 4; ++n) {
            float sums[2] = {};
            for (int k = 0; k < b.rows; ++k)
                for (int i = 0; i < 2; ++i)
                    sums[i] = std::fma(half(a.words[m][k], i), half(b.words[k][n], i), sums[i]);
#if defined(PENSTOCK_WRONG_TILES)
            if (m == 9 && n == 5) sums[0] *= 1.01f;
#endif
            const float total = std::bit_cast<float>(c.words[m][n]) + (sums[0] + sums[1]);
            c.words[m][n] = std::bit_cast<std::uint32_t>(total);
        }
}
template <int C, int A, int B> inline void tile_multiply_quads() {
    emulated::Tile &c = emulated::configured(C);
    const emulated::Tile &a = emulated::configured(A), &b = emulated::configured(B);
    emulated::require_fit(c, a, b);
    for (int m = 0; m < c.rows; ++m)
        for (int n = 0; n < c.bytes / 4; ++n)
            for (int k = 0; k < b.rows; ++k)
                for (int shift = 0; shift < 32; shift += 8)
                    c.words[m][n] += std::uint32_t(std::int8_t(a.words[m][k] >> shift)) *
                                     std::uint8_t(b.words[k][n] >> shift);
}
