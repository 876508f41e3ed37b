// Products with weights of 8-bit floats: y = x W^T, where W[n, k] = scale[n, g] * code[n, k], and g is the group
// of k. A code is e4m3: a sign, four bits of exponent, and three of fraction.
//
// Activations are those of plain weights. Codes become numbers of 16 bits in the nearest cache, some columns of a
// band at a time, and products.h multiplies these with all rows; or they stay in registers, where there are
// instructions to look both bytes of bfloat16 up. A sum of a group has the bits that plain weights with the codes'
// values would give it, and is scaled once: so what products.h says of a token's result holds here as well.
//
// Codes lie as products.h has numbers of 16 bits, in bytes, but for place_of_code.
#pragma once
#include <algorithm>

#include "products.h"

// Columns that are widened together: 16 KiB, which stay in the nearest cache beside what is read of x.
constexpr int64_t kWidenedColumns = 256;

// Codes become this: bfloat16 for activations of it, else float16, which processors widen in one instruction.
// Both hold all values of e4m3, divided by 256: so the exponent of float16 is that of the code.
template <class X> struct Widened {
    using Type = f16;
};
template <> struct Widened<bf16> {
    using Type = bf16;
};

// A matrix in bands. Scales, times 256, of the groups of each band: [32], or one where a band shares it.
struct Fp8 {
    const unsigned char *codes;
    const float *scales;
    int64_t columns, group;
    bool is_by_band;

    int64_t groups() const { return (columns + group - 1) / group; }
};

// kLanes codes as numbers of float16.
inline Halves as_f16(const unsigned char *codes) {
    typedef unsigned char Codes __attribute__((vector_size(kLanes), aligned(1), may_alias));
    typedef std::int16_t Signed __attribute__((vector_size(2 * kLanes)));
    const auto high = __builtin_convertvector(*reinterpret_cast<const Codes *>(codes), Halves) << 8;
    return (Halves)((Signed)high >> 1) & 0xbf80;
}
inline void widen_lanes(const unsigned char *codes, f16 *out) {
    *reinterpret_cast<Halves *>(out) = as_f16(codes);
}
// By way of float32, whose upper half it is, without rest.
inline void widen_lanes(const unsigned char *codes, bf16 *out) {
    const Halves halves = as_f16(codes);
    const Floats wide = load(reinterpret_cast<const f16 *>(&halves));
    *reinterpret_cast<Halves *>(out) = __builtin_convertvector((Words)wide >> 16, Halves);
}
template <class Wide>
inline void widen_codes(const unsigned char *codes, int64_t count, bool prefetches, Wide *out) {
    for (int64_t i = 0; i < count; i += 64) {
        if (prefetches) __builtin_prefetch(codes + i + kPrefetchBytes, 0, 2);
#pragma GCC unroll 16
        for (int64_t j = i; j < i + 64; j += kLanes) widen_lanes(codes + j, out + j);
    }
}

#if defined(__AVX512VBMI__)
// Looks up both bytes of bfloat16 for 64 codes: by the code without its sign.
class Fp8Table {
  public:
    Fp8Table() {
        static const Bytes bytes;
        for (int i = 0; i < 2; ++i) {
            low_[i] = _mm512_load_si512(bytes.low + 64 * i);
            high_[i] = _mm512_load_si512(bytes.high + 64 * i);
        }
    }
    // Two halves, which are interleaved within 128 bits: see place_of_code.
    void widen(const unsigned char *codes, Words &first, Words &second) const {
        const __m512i c = _mm512_loadu_si512(codes);
        const __m512i low = _mm512_permutex2var_epi8(low_[0], c, low_[1]);
        const __m512i size = _mm512_permutex2var_epi8(high_[0], c, high_[1]);
        constexpr int kOrAnd = 0xf8;  // the first, or both others
        const __m512i high =
            _mm512_ternarylogic_epi64(size, c, _mm512_set1_epi8(-128), kOrAnd);
        first = (Words)_mm512_unpacklo_epi8(low, high);
        second = (Words)_mm512_unpackhi_epi8(low, high);
    }

  private:
    struct Bytes {
        alignas(64) unsigned char low[128], high[128];

        Bytes() {
            unsigned char codes[128];
            bf16 values[128];
            for (int i = 0; i < 128; ++i) codes[i] = (unsigned char)i;
            for (int i = 0; i < 128; i += kLanes) widen_lanes(codes + i, values + i);
            for (int i = 0; i < 128; ++i) {
                low[i] = (unsigned char)values[i].bits;
                high[i] = (unsigned char)(values[i].bits >> 8);
            }
        }
    };
    __m512i low_[2], high_[2];
};
template <>
inline void widen_codes(const unsigned char *codes, int64_t count, bool prefetches, bf16 *out) {
    const Fp8Table table;
    for (int64_t i = 0; i < count; i += 64) {
        if (prefetches) __builtin_prefetch(codes + i + kPrefetchBytes, 0, 2);
        Words first, second;
        table.widen(codes + i, first, second);
        *reinterpret_cast<Words *>(out + i) = first;
        *reinterpret_cast<Words *>(out + i + 32) = second;
    }
}
#endif

// Whether it multiplies rows without storing what is widened: the sums of `length` columns.
template <class X>
inline bool multiplied_fp8(const X *, int64_t, int64_t, const unsigned char *, int64_t, float *) {
    return false;
}
#if defined(__AVX512VBMI__) && defined(PENSTOCK_PAIRS)
// As multiply_tile, in the same order. Codes are widened again for each tile of rows: beside the products, that takes
// less time than to store and load what is widened. On a Zen 4, a step of one row takes an eighth less, of eight a
// quarter.
template <int R>
__attribute__((noinline)) void multiply_fp8_tile(const bf16 *x, int64_t x_step,
                                                 const unsigned char *codes, int64_t length,
                                                 float *c) {
    static_assert(kBand == 2 * kLanes);
    const Fp8Table table;
    Floats total[R][2] = {};
    const bool is_prefetched = prefetches(R, kPrefetchRows);
    for (int64_t k = 0; k < length; k += 2, codes += 2 * kBand) {
        if (is_prefetched) __builtin_prefetch(codes + kPrefetchBytes, 0, 2);
        Words left, right;
        table.widen(codes, left, right);
#pragma GCC unroll 16
        for (int i = 0; i < R; ++i) {
            std::uint32_t pair;
            std::memcpy(&pair, x + i * x_step + k, sizeof pair);
            const Words one = keep(Words{} + pair);
            total[i][0] = add_pairs(total[i][0], one, left);
            total[i][1] = add_pairs(total[i][1], one, right);
        }
    }
    for (int i = 0; i < R; ++i)
        for (int j = 0; j < 2; ++j) store(c + i * kBand + j * kLanes, total[i][j]);
}
template <int... R>
inline void multiply_fp8_rows(int64_t rows, const bf16 *x, int64_t x_step,
                              const unsigned char *codes, int64_t length, float *c,
                              std::integer_sequence<int, R...>) {
    using Tile = void (*)(const bf16 *, int64_t, const unsigned char *, int64_t, float *);
    static constexpr Tile kTiles[] = {multiply_fp8_tile<R + 1>...};
    kTiles[rows - 1](x, x_step, codes, length, c);
}
inline bool multiplied_fp8(const bf16 *x, int64_t x_step, int64_t rows, const unsigned char *codes,
                           int64_t length, float *sums) {
#if defined(PENSTOCK_TILES)
    if (may_use_tiles()) return false;
#endif
    const int64_t tiles = (rows + kTileRows - 1) / kTileRows;
    constexpr auto kRows = std::make_integer_sequence<int, kTileRows>();
    for (int64_t tile = 0; tile < tiles; ++tile) {
        const int64_t row = tile * rows / tiles, count = (tile + 1) * rows / tiles - row;
        multiply_fp8_rows(count, x + row * x_step, x_step, codes, length, sums + row * kBand, kRows);
    }
    return true;
}
#endif

// Where a code lies that is this one of 64.
template <class X> int64_t place_of_code(int64_t index) {
#if defined(__AVX512VBMI__)
    if constexpr (std::is_same_v<X, bf16>)
        return index % 8 + index / 8 % 4 * 16 + index / 32 * 8;
#endif
    return index;
}

// Packs rows of codes; `out` has room for whole bands. The number of columns is even, as bfloat16 lies in pairs.
// Returns whether all codes are numbers.
template <class X>
bool pack_fp8(unsigned char *out, const unsigned char *codes, int64_t rows, int64_t columns) {
    constexpr int64_t group = Operands<typename Widened<X>::Type>::group;
    bool are_numbers = true;
    int64_t index = 0;
    for (int64_t first = 0; first < rows; first += kBand)
        for (int64_t k = 0; k < columns; k += group)
            for (int64_t n = first; n < first + kBand; ++n)
                for (int64_t i = k; i < k + group; ++i, ++index) {
                    const unsigned char code = n < rows ? codes[n * columns + i] : 0;
                    are_numbers &= (code & 0x7f) != 0x7f;
                    out[index / 64 * 64 + place_of_code<X>(index % 64)] = code;
                }
    return are_numbers;
}

// c[i][0..32) += the scales of a group times its sums, or are set to that where it is the first.
inline void put_scaled(const float *sums, int64_t rows, const Fp8 &w, int64_t band, int64_t g, float *c,
                       int64_t c_step) {
    const int64_t at = band * w.groups() + g;
    for (int64_t n = 0; n < kBand; n += kLanes) {
        const Floats scale = w.is_by_band ? all(w.scales[at]) : load(w.scales + at * kBand + n);
        for (int64_t i = 0; i < rows; ++i) {
            float *to = c + i * c_step + n;
            const Floats sum = load(sums + i * kBand + n);
            store(to, g ? fused(sum, scale, load(to)) : sum * scale);
        }
    }
}

// c[i][0..32) = x_i . w, for rows of x and a band of w. x, and c, have room for whole tiles of 16 rows.
template <class X>
inline void multiply_fp8(const X *x, int64_t x_step, int64_t rows, const Fp8 &w, int64_t band,
                         float *c, int64_t c_step) {
    using Wide = typename Widened<X>::Type;
    constexpr int64_t kRows = 192, kSpare = 32;
    alignas(64) Wide wide[kWidenedColumns * kBand];
    alignas(64) float sums[(kRows + kSpare) * kBand];
    const unsigned char *codes = w.codes + band * kBand * w.columns;
    for (; rows > 0; rows -= kRows, x += kRows * x_step, c += kRows * c_step) {
        const int64_t count = std::min(rows, kRows);
        for (int64_t g = 0; g < w.groups(); ++g) {
            const int64_t begin = g * w.group, end = std::min(begin + w.group, w.columns);
            const bool is_done =
                multiplied_fp8(x + begin, x_step, count, codes + begin * kBand, end - begin, sums);
            for (int64_t k = begin; k < end && !is_done; k += kWidenedColumns) {
                const int64_t length = std::min(kWidenedColumns, end - k);
                widen_codes(codes + k * kBand, length * kBand, prefetches(count, kPrefetchRows), wide);
                multiply_band<Wide>(x + k, x_step, count, wide, length, k == begin, sums, kBand);
            }
            put_scaled(sums, count, w, band, g, c, c_step);
        }
    }
}
