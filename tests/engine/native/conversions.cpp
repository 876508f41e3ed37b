// What vectors.h converts to and from float16, for tests: by vectors, and value by value.
#include "native/products/vectors.h"

extern "C" void widened(const std::uint16_t *from, int64_t count, float *vectors, float *values) {
    const f16 *halves = reinterpret_cast<const f16 *>(from);
    for (int64_t i = 0; i < count; i += kLanes) store(vectors + i, load(halves + i));
    for (int64_t i = 0; i < count; ++i) values[i] = widen(halves[i]);
}

extern "C" void rounded(const float *from, int64_t count, std::uint16_t *vectors,
                        std::uint16_t *values) {
    for (int64_t i = 0; i < count; i += kLanes)
        store(reinterpret_cast<f16 *>(vectors) + i, load(from + i));
    for (int64_t i = 0; i < count; ++i) store(reinterpret_cast<f16 *>(values) + i, from[i]);
}
