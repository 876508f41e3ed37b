// What the headers use of AVX-512 with VNNI, or without it (-DWITHOUT_VNNI), lane by lane, for processors with AVX2: to
// be included before all else (-include). Source: Intel 64 and IA-32 Software Developer's Manual, volume 2.
#pragma once
#include <immintrin.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#if defined(__AVX512F__)
#error "it is for processors without AVX-512"
#endif
#define __AVX512F__ 1
#define __AVX512BW__ 1
#if !defined(WITHOUT_VNNI)
#define __AVX512VNNI__ 1
#endif
// Vectors of 64 bytes have no register here that keep() in vectors.h could name.
#define asm(...)

namespace emulated {

typedef std::int32_t Lanes __attribute__((vector_size(64), may_alias));

// A vector of `Out` from function(i) for each lane i.
template <class Out, class Function> inline Out each(int lanes, Function function) {
    Out out{};
    for (int i = 0; i < lanes; ++i) out[i] = function(i);
    return out;
}
template <class Lane, class Vector> inline Lane lane(const Vector &v, int i) {
    Lane value;
    std::memcpy(&value, reinterpret_cast<const char *>(&v) + i * sizeof value, sizeof value);
    return value;
}

inline __m512i loadu_si512(const void *p) {
    __m512i v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
inline __m512 fmadd_ps(__m512 a, __m512 b, __m512 c) {
    return each<__m512>(16, [&](int i) { return std::fma(a[i], b[i], c[i]); });
}
inline __m512 cvtepi32_ps(__m512i v) {
    return each<__m512>(16, [&](int i) { return float(lane<std::int32_t>(v, i)); });
}
template <class Lane, class Vector> inline __m512i widened(const Vector &v) {
    return (__m512i)each<Lanes>(16, [&](int i) { return std::int32_t(lane<Lane>(v, i)); });
}
inline __m512i cvtepi8_epi32(__m128i v) { return widened<std::int8_t>(v); }
inline __m512i cvtepu8_epi32(__m128i v) { return widened<std::uint8_t>(v); }
inline __m512i cvtepu16_epi32(__m256i v) { return widened<std::uint16_t>(v); }
inline __m128i cvtepi32_epi8(__m512i v) {
    typedef std::int8_t Bytes __attribute__((vector_size(16)));
    return (__m128i)each<Bytes>(16, [&](int i) { return std::int8_t(lane<std::int32_t>(v, i)); });
}
inline __m512 cvtph_ps(__m256i v) {
    return each<__m512>(16, [&](int i) { return _cvtsh_ss(lane<std::uint16_t>(v, i)); });
}
inline __m256i cvtps_ph(__m512 v, int) {  // to nearest
    typedef std::uint16_t Halves __attribute__((vector_size(32)));
    return (__m256i)each<Halves>(16, [&](int i) { return _cvtss_sh(v[i], _MM_FROUND_TO_NEAREST_INT); });
}
// In each 16 bytes alone.
inline __m512i shuffle_epi8(__m512i table, __m512i at) {
    typedef std::uint8_t Bytes __attribute__((vector_size(64)));
    return (__m512i)each<Bytes>(64, [&](int i) {
        const auto index = lane<std::uint8_t>(at, i);
        return index & 128 ? std::uint8_t(0) : lane<std::uint8_t>(table, i / 16 * 16 + index % 16);
    });
}
template <class Function> inline __m512i each_byte(Function function) {
    typedef std::int8_t Bytes __attribute__((vector_size(64)));
    return (__m512i)each<Bytes>(64, function);
}
template <class Function> inline __m512i each_short(Function function) {
    typedef std::int16_t Shorts __attribute__((vector_size(64)));
    return (__m512i)each<Shorts>(32, function);
}
inline __m512i abs_epi8(__m512i v) {
    return each_byte([&](int i) { return std::int8_t(std::abs(int(lane<std::int8_t>(v, i)))); });
}
inline std::uint64_t movepi8_mask(__m512i v) {
    std::uint64_t mask = 0;
    for (int i = 0; i < 64; ++i) mask |= std::uint64_t(lane<std::int8_t>(v, i) < 0) << i;
    return mask;
}
inline __m512i mask_sub_epi8(__m512i otherwise, std::uint64_t mask, __m512i a, __m512i b) {
    return each_byte([&](int i) {
        const int difference = lane<std::int8_t>(a, i) - lane<std::int8_t>(b, i);
        return mask >> i & 1 ? std::int8_t(difference) : lane<std::int8_t>(otherwise, i);
    });
}
inline __m512i add_epi16(__m512i a, __m512i b) {
    return each_short([&](int i) { return std::int16_t(lane<std::int16_t>(a, i) + lane<std::int16_t>(b, i)); });
}
// Unsigned bytes of a by signed ones of b; sums that do not fit are the nearest that do.
inline __m512i maddubs_epi16(__m512i a, __m512i b) {
    return each_short([&](int i) {
        int sum = 0;
        for (int j = 2 * i; j < 2 * i + 2; ++j) sum += lane<std::uint8_t>(a, j) * lane<std::int8_t>(b, j);
        return std::int16_t(std::clamp(sum, -32768, 32767));
    });
}
inline __m512i madd_epi16(__m512i a, __m512i b) {
    return (__m512i)each<Lanes>(16, [&](int i) {
        std::int32_t sum = 0;
        for (int j = 2 * i; j < 2 * i + 2; ++j) sum += lane<std::int16_t>(a, j) * lane<std::int16_t>(b, j);
        return sum;
    });
}
// Unsigned bytes of a by signed ones of b.
inline __m512i dpbusd_epi32(__m512i total, __m512i a, __m512i b) {
    return (__m512i)each<Lanes>(16, [&](int i) {
        std::int32_t sum = lane<std::int32_t>(total, i);
        for (int j = 4 * i; j < 4 * i + 4; ++j)
            sum += lane<std::uint8_t>(a, j) * lane<std::int8_t>(b, j);
        return sum;
    });
}
template <class Lane, class Vector, class Join> inline Lane reduced(const Vector &v, Join join) {
    Lane lanes[16];
    std::memcpy(lanes, &v, sizeof lanes);
    for (int width = 8; width; width /= 2)
        for (int i = 0; i < width; ++i) lanes[i] = join(lanes[i], lanes[i + width]);
    return lanes[0];
}
inline float reduce_add_ps(__m512 v) { return reduced<float>(v, std::plus<float>()); }
inline float reduce_max_ps(__m512 v) {
    return reduced<float>(v, [](float a, float b) { return std::max(a, b); });
}
inline std::int32_t reduce_add_epi32(__m512i v) { return reduced<std::int32_t>(v, std::plus<std::int32_t>()); }
inline std::int32_t reduce_max_epi32(__m512i v) {
    return reduced<std::int32_t>(v, [](std::int32_t a, std::int32_t b) { return std::max(a, b); });
}

}  // namespace emulated

#define _mm512_loadu_si512 emulated::loadu_si512
#define _mm512_fmadd_ps emulated::fmadd_ps
#define _mm512_cvtepi32_ps emulated::cvtepi32_ps
#define _mm512_cvtepi8_epi32 emulated::cvtepi8_epi32
#define _mm512_cvtepu8_epi32 emulated::cvtepu8_epi32
#define _mm512_cvtepu16_epi32 emulated::cvtepu16_epi32
#define _mm512_cvtepi32_epi8 emulated::cvtepi32_epi8
#define _mm512_cvtph_ps emulated::cvtph_ps
#define _mm512_cvtps_ph emulated::cvtps_ph
#define _mm512_shuffle_epi8 emulated::shuffle_epi8
#define _mm512_abs_epi8 emulated::abs_epi8
#define _mm512_movepi8_mask emulated::movepi8_mask
#define _mm512_mask_sub_epi8 emulated::mask_sub_epi8
#define _mm512_add_epi16 emulated::add_epi16
#define _mm512_maddubs_epi16 emulated::maddubs_epi16
#define _mm512_madd_epi16 emulated::madd_epi16
#define _mm512_dpbusd_epi32 emulated::dpbusd_epi32
#define _mm512_reduce_add_ps emulated::reduce_add_ps
#define _mm512_reduce_max_ps emulated::reduce_max_ps
#define _mm512_reduce_add_epi32 emulated::reduce_add_epi32
#define _mm512_reduce_max_epi32 emulated::reduce_max_epi32
