// The instructions of AMX, for tiles.h and grouped_tiles.h: eight registers that hold a tile each, of up to 16
// rows of up to 64 bytes.
//
// As assembly, since GCC 12's functions of these names let reads and writes of memory be moved across: the
// clobbers forbid it. Source: Intel 64 and IA-32 Software Developer's Manual, volume 1, chapter 18.
// Another header may define PENSTOCK_TILES and these functions before: tests/engine/native/emulated_amx.h
// does it in plain C++.
#pragma once
#include <cstdint>

#if !defined(PENSTOCK_TILES) && defined(__AMX_BF16__) && defined(__AMX_INT8__)
#define PENSTOCK_TILES 1

#include <sys/syscall.h>
#include <unistd.h>

using std::int64_t;

// The system grants them to a process that asks; it may not know them, or a sandbox may forbid to ask.
inline bool tiles_are_granted() {
    constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
}

// The palette at byte 0, bytes in a row of each tile at 16, in two bytes, and rows at 48.
inline void configure_tiles(const unsigned char (&config)[64]) {
    asm volatile("ldtilecfg %0" ::"m"(config) : "memory");
}
inline void release_tiles() { asm volatile("tilerelease" ::: "memory"); }

template <int I> inline void tile_zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(I));
}
template <int I> inline void tile_load(const void *from, int64_t step_bytes) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(step_bytes), "i"(I) : "memory");
}
template <int I> inline void tile_store(void *to, int64_t step_bytes) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(step_bytes), "i"(I) : "memory");
}
// C += A B, where each word of A, and of B, is a pair of bfloat16 along k.
template <int C, int A, int B> inline void tile_multiply_pairs() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}
// The same where each word is four bytes along k, signed ones of A and unsigned ones of B.
template <int C, int A, int B> inline void tile_multiply_quads() {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

#endif
