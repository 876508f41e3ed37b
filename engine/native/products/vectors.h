// Vectors of floats as wide as the processor's, and conversions to and from the types of weights.
#pragma once
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

using std::int64_t;

struct bf16 {
    std::uint16_t bits;
};
struct f16 {
    std::uint16_t bits;
};

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
typedef float Floats __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
typedef std::uint32_t Words __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
typedef std::uint16_t Halves __attribute__((vector_size(2 * kLanes), aligned(2), may_alias));

// A value to keep in a register: GCC 12 would otherwise read it from memory for each product.
template <class Vector> inline Vector keep(Vector v) {
#if defined(__AVX512F__)
    asm("" : "+v"(v));
#elif defined(__AVX__)
    asm("" : "+x"(v));
#endif
    return v;
}

inline Floats load(const float *p) { return *reinterpret_cast<const Floats *>(p); }
// Widens 16 bits. GCC 12 would convert the halves of a vector, and join them.
inline Words words(const void *p) {
#if defined(__AVX512F__)
    return (Words)_mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i *>(p)));
#elif defined(__AVX2__)
    return (Words)_mm256_cvtepu16_epi32(_mm_loadu_si128(static_cast<const __m128i *>(p)));
#else
    return __builtin_convertvector(*static_cast<const Halves *>(p), Words);
#endif
}
inline Floats load(const bf16 *p) { return (Floats)(words(p) << 16); }
// Widens bytes. GCC 12 would convert one after the other.
inline Floats load(const std::int8_t *p) {
#if defined(__AVX512F__)
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i *>(p));
    return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
#elif defined(__AVX2__)
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i *>(p));
    return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
#else
    typedef std::int8_t Bytes __attribute__((vector_size(kLanes), aligned(1), may_alias));
    return __builtin_convertvector(*reinterpret_cast<const Bytes *>(p), Floats);
#endif
}
inline Floats load(const unsigned char *p) {
#if defined(__AVX512F__)
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i *>(p));
    return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes));
#elif defined(__AVX2__)
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i *>(p));
    return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes));
#else
    typedef unsigned char Bytes __attribute__((vector_size(kLanes), aligned(1), may_alias));
    return __builtin_convertvector(*reinterpret_cast<const Bytes *>(p), Floats);
#endif
}
inline float widen(float x) { return x; }
inline float widen(bf16 x) { return std::bit_cast<float>(std::uint32_t(x.bits) << 16); }

inline void store(float *p, float x) { *p = x; }
inline void store(float *p, Floats x) { *reinterpret_cast<Floats *>(p) = x; }
template <class Bits> inline Bits rounded(Bits bits) {  // to nearest, ties to even, as torch does
    return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}
inline void store(bf16 *p, float x) { p->bits = rounded(std::bit_cast<std::uint32_t>(x)); }
#if defined(__AVX512BF16__)
inline void store(bf16 *p, Floats x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), (__m256i)_mm512_cvtneps_pbh((__m512)x));
}
#else
inline void store(bf16 *p, Floats x) {
    *reinterpret_cast<Halves *>(p) = __builtin_convertvector(rounded((Words)x), Halves);
}
#endif

// float16 by integer arithmetic, for one value or a vector of them, where no instruction converts.
template <class Float, class Bits> inline Float expanded(Bits bits) {
    // The product moves the exponent to where float32 has it, and normalises what is subnormal.
    Float magnitude = std::bit_cast<Float>((bits & 0x7fff) << 13) * 0x1p112f;
    Bits special = (bits & 0x7c00) == 0x7c00 ? 0x7f800000u + 0 * bits : 0 * bits;
    return std::bit_cast<Float>(std::bit_cast<Bits>(magnitude) | special | (bits & 0x8000) << 16);
}
template <class Bits, class Float> inline Bits shortened(Float x) {  // to nearest, ties to even
    Bits bits = std::bit_cast<Bits>(x), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
    Bits normal = (size - (112u << 23) + 0xfff + (size >> 13 & 1)) >> 13;
    // 0.5 has steps of 2^-24, as the subnormal numbers of float16 do.
    Bits tiny = std::bit_cast<Bits>(std::bit_cast<Float>(size) + 0.5f) - 0x3f000000u;
    return sign | (size < 0x38800000u ? tiny : size > 0x7f800000u ? 0x7e00u + 0 * bits : normal);
}
// NaN for what float16 cannot hold. As an infinity, a key could get the weight 0, and the answer
// would be wrong without a sign of it; a NaN reaches the logits.
template <class Float> inline Float held_by_f16(Float x) {
    return x < 65520.0f && x > -65520.0f ? x : 0 * x + NAN;
}
inline float widen(f16 x) { return expanded<float>(std::uint32_t(x.bits)); }
inline void store(f16 *p, float x) { p->bits = shortened<std::uint32_t>(held_by_f16(x)); }
#if defined(__AVX512F__)
inline Floats load(const f16 *p) {
    return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
}
inline void store(f16 *p, Floats x) {
    __m256i bits = _mm512_cvtps_ph((__m512)held_by_f16(x), _MM_FROUND_TO_NEAREST_INT);
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), bits);
}
#elif defined(__AVX__) && defined(__F16C__)
inline Floats load(const f16 *p) {
    return (Floats)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
}
inline void store(f16 *p, Floats x) {
    _mm_storeu_si128(reinterpret_cast<__m128i *>(p),
                     _mm256_cvtps_ph((__m256)held_by_f16(x), _MM_FROUND_TO_NEAREST_INT));
}
#elif defined(__aarch64__)
typedef __fp16 F16s __attribute__((vector_size(2 * kLanes), aligned(2), may_alias));
inline Floats load(const f16 *p) {
    return __builtin_convertvector(*reinterpret_cast<const F16s *>(p), Floats);
}
inline void store(f16 *p, Floats x) {
    *reinterpret_cast<F16s *>(p) = __builtin_convertvector(held_by_f16(x), F16s);
}
#else
inline Floats load(const f16 *p) {
    return expanded<Floats>(
        __builtin_convertvector(*reinterpret_cast<const Halves *>(p), Words));
}
inline void store(f16 *p, Floats x) {
    *reinterpret_cast<Halves *>(p) =
        __builtin_convertvector(shortened<Words>(held_by_f16(x)), Halves);
}
#endif

// a * b + total with one rounding, wherever the processor can; the same for one value and for a vector.
inline Floats fused(Floats a, Floats b, Floats total) {
#if defined(__AVX512F__)
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)total);
#elif defined(__FMA__)
    return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)total);
#elif defined(__aarch64__)
    return (Floats)vfmaq_f32((float32x4_t)total, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + total;
#endif
}
inline Floats all(float x) { return x - Floats{}; }

// A square of words, mirrored: lane j of row i becomes lane i of row j. Each pass swaps squares of
// S x S between the rows of a pair.
template <int S, std::size_t... J>
inline void exchange(Words &a, Words &b, std::index_sequence<J...>) {
#if defined(__clang__)
    Words low = __builtin_shufflevector(a, b, int(J & S ? kLanes + J - S : J)...);
    Words high = __builtin_shufflevector(a, b, int(J & S ? kLanes + J : J + S)...);
#else
    Words low = __builtin_shuffle(a, b, Words{std::uint32_t(J & S ? kLanes + J - S : J)...});
    Words high = __builtin_shuffle(a, b, Words{std::uint32_t(J & S ? kLanes + J : J + S)...});
#endif
    a = low;
    b = high;
}
template <int S = 1> inline void transpose(Words (&rows)[kLanes]) {
    if constexpr (S < kLanes) {
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i)
            if (!(i & S)) exchange<S>(rows[i], rows[i + S], std::make_index_sequence<kLanes>());
        transpose<2 * S>(rows);
    }
}

// Adds all lanes, always in the same order.
inline float sum(Floats v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)v);
#else
    float total = 0;
    for (int i = 0; i < kLanes; ++i) total += v[i];
    return total;
#endif
}
inline float highest(Floats v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#else
    float peak = v[0];
    for (int i = 1; i < kLanes; ++i) peak = v[i] > peak ? v[i] : peak;
    return peak;
#endif
}
inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }

// e^x to the last bit or two. Source of the polynomial: Moshier's Cephes, expf.
inline Floats exp(Floats x) {
    x = x < -87.0f ? Floats{} - 87.0f : x;
    x = x > 88.0f ? Floats{} + 88.0f : x;
    const float shift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    Floats shifted = x * 1.44269504f + shift, n = shifted - shift;
    Floats r = x - n * 0.693359375f + n * 2.12194440e-4f;
    Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    Words power = ((Words)shifted - 0x4b400000u + 127u) << 23;
    return (p * r * r + r + 1.0f) * (Floats)power;
}
