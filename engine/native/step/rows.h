// Rows of numbers: what is computed with them one by one, whatever type they are stored as.
#pragma once
#include <cmath>
#include <cstdint>

#include "native/products/vectors.h"

inline float mean_square(const float *in, int64_t size) {
    Floats squares = {};
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) squares = fused(load(in + i), load(in + i), squares);
    float total = sum(squares);
    for (; i < size; ++i) total += in[i] * in[i];
    return total / size;
}

// out may be in.
template <class Out>
inline void multiply_by(const float *in, const float *scale, int64_t size, float square, float eps,
                        Out *out) {
    const float factor = 1.0f / std::sqrt(square + eps);
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) store(out + i, load(in + i) * factor * load(scale + i));
    for (; i < size; ++i) store(out + i, in[i] * factor * scale[i]);
}

// How a model's norms are computed. is_centred: the mean is subtracted before, and a bias, which follows the scale in
// memory, is added.
struct NormKind {
    NormKind(float of, bool centred = false) : eps(of), is_centred(centred) {}
    float eps;
    bool is_centred;
};

template <class Out>
inline void centre(const float *in, const float *scale, int64_t size, float eps, Out *out) {
    const float *bias = scale + size;
    Floats sums = {}, squares = {};
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) sums = sums + load(in + i);
    float total = sum(sums), square = 0;
    for (; i < size; ++i) total += in[i];
    const float mean = total / size;
    for (i = 0; i + kLanes <= size; i += kLanes) {
        const Floats x = load(in + i) - mean;
        squares = fused(x, x, squares);
    }
    square = sum(squares);
    for (; i < size; ++i) square += (in[i] - mean) * (in[i] - mean);
    const float factor = 1.0f / std::sqrt(square / size + eps);
    for (i = 0; i + kLanes <= size; i += kLanes)
        store(out + i, (load(in + i) - mean) * factor * load(scale + i) + load(bias + i));
    for (; i < size; ++i) store(out + i, (in[i] - mean) * factor * scale[i] + bias[i]);
}

// scale: null where there is no norm. out may be in.
template <class Out>
inline void normalise(const float *in, const float *scale, int64_t size, NormKind by, Out *out) {
    const float eps = by.eps;
    if (scale && by.is_centred) return centre(in, scale, size, eps, out);
    if (scale) return multiply_by(in, scale, size, mean_square(in, size), eps, out);
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) store(out + i, load(in + i));
    for (; i < size; ++i) store(out + i, in[i]);
}

// An MLP, or an expert, makes this of gate and up. limit: both are clamped to it; 0: they are not.
struct Activation {
    int64_t gelu;  // 0: SiLU; 1: GELU by tanh; 2: by the error function
    float alpha, limit;

    // GELU by tanh is x times a sigmoid, too: (1 + tanh(y / 2)) / 2 = 1 / (1 + exp(-y)).
    Floats of(Floats x) const {
        if (gelu == 2) return exact(x);
        const bool is_gelu = gelu;
        const Floats y = is_gelu ? x * (1.5957691216f + 0.0713548163f * x * x) : x;
        return x / (1.0f + exp(-y));
    }

    // x times the normal distribution's share below it, whose tail is within 8e-8. Source: Abramowitz and Stegun 1964,
    // 7.1.26.
    static Floats exact(Floats x) {
        const Floats size = larger(x, -x), z = size * 0.7071067812f, t = 1.0f / (1.0f + 0.3275911f * z);
        const Floats polynomial =
            t * (0.254829592f + t * (-0.284496736f + t * (1.421413741f + t * (-1.453152027f + t * 1.061405429f))));
        return larger(x, Floats{}) - size * 0.5f * polynomial * exp(-z * z);
    }
};

// Reads rows that are in_step apart, and writes rows that are out_step apart.
template <class Out>
inline void activate(Activation by, const float *gate, const float *up, int64_t in_step, int64_t rows,
                     int64_t size, Out *out, int64_t out_step) {
    for (int64_t row = 0; row < rows; ++row, gate += in_step, up += in_step, out += out_step) {
        int64_t n = 0;
        for (; by.limit && n < size; ++n) {
            // In this order, what is NaN stays NaN.
            const float limit = by.limit, g = gate[n] > limit ? limit : gate[n];
            const float u = up[n] > limit ? limit : up[n] < -limit ? -limit : up[n];
            store(out + n, g / (1.0f + std::exp(-by.alpha * g)) * (u + 1.0f));
        }
        for (; n + kLanes <= size; n += kLanes) store(out + n, by.of(load(gate + n)) * load(up + n));
        for (; n < size; ++n) store(out + n, by.of(all(gate[n]))[0] * up[n]);
    }
}

inline void multiply_by_sigmoid(const float *gate, int64_t count, float *x) {
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) store(x + i, load(x + i) / (1.0f + exp(-load(gate + i))));
    for (; i < count; ++i) x[i] = (x[i] / (1.0f + exp(-all(gate[i]))))[0];
}

template <class Out> inline void divide(const float *in, float by, int64_t count, Out *out) {
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) store(out + i, load(in + i) / by);
    for (; i < count; ++i) store(out + i, in[i] / by);
}

// The rotary embedding of a head, times a factor: of its first 2 * half numbers.
struct Rotation {
    const float *cos, *sin;  // (half)
    int64_t half;
    float factor;
};

template <class Out>
inline void rotate(const float *head, int64_t dim, Rotation by, Out *out) {
    const int64_t half = by.half;
    int64_t i = 0;
    for (; i + kLanes <= half; i += kLanes) {
        const Floats left = load(head + i), right = load(head + i + half);
        const Floats c = load(by.cos + i), s = load(by.sin + i);
        store(out + i, (left * c - right * s) * by.factor);
        store(out + i + half, (right * c + left * s) * by.factor);
    }
    for (; i < half; ++i) {
        const float left = head[i], right = head[i + half];
        store(out + i, (left * by.cos[i] - right * by.sin[i]) * by.factor);
        store(out + i + half, (right * by.cos[i] + left * by.sin[i]) * by.factor);
    }
    for (i = 2 * half; i < dim; ++i) store(out + i, head[i] * by.factor);
}

// The same, without a factor, of pairs that are neighbours; those of `out` are half apart.
inline void rotate_neighbours(const float *head, Rotation by, float *out) {
    for (int64_t i = 0; i < by.half; ++i) {
        const float left = head[2 * i], right = head[2 * i + 1];
        out[i] = left * by.cos[i] - right * by.sin[i];
        out[i + by.half] = right * by.cos[i] + left * by.sin[i];
    }
}
