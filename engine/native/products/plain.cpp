// Products with plain weights of PENSTOCK_WEIGHTS, and rows of it: see weights.h.
#include <string>

#include "native/step/low_rank.h"
#include "products.h"
#include "native/step/weights.h"

namespace {

using T = PENSTOCK_WEIGHTS;
using X = Operands<T>::X;

const T *weights(const void *at) { return static_cast<const T *>(at); }

template <class In> void widen_row(const In *in, int64_t size, float *out) {
    for (int64_t i = 0; i < size; ++i) out[i] = widen(in[i]);
}

template <class Out> void copy_row(const T *in, int64_t size, Out *out) {
    if constexpr (std::is_same_v<T, Out>)
        std::copy_n(in, size, out);
    else
        widen_row(in, size, out);
}

}  // namespace

const int64_t kWeightBytes = sizeof(T), kActivationBytes = sizeof(X);

// ---- Products ------------------------------------------------------------------------------------

void multiply_plain(const void *x, int64_t x_step, int64_t rows, const void *w, int64_t band,
                    int64_t length, float *c, int64_t c_step) {
    multiply_band<T>(static_cast<const X *>(x), x_step / int64_t(sizeof(X)), rows,
                     weights(w) + band * kBand * length, length, true, c, c_step);
}

void add_bias(const void *bias, int64_t band, int64_t count, int64_t rows, float *c, int64_t c_step) {
    const T *of_band = weights(bias) + band * kBand;
    for (int64_t i = 0; i < rows; ++i)
        for (int64_t n = 0; n < count; ++n) c[i * c_step + n] += widen(of_band[n]);
}

std::string plain_products() { return products<T>(); }

// A matrix as products.h wants it. `out` has room for whole bands, and may be `rows`.
extern "C" void penstock_pack(T *out, const T *rows, int64_t num_rows, int64_t columns) {
    pack(out, rows, num_rows, columns);
}

// ---- Rows ----------------------------------------------------------------------------------------

void embed_row(const void *table, int64_t row, int64_t size, bool in_bands, float factor, float *out) {
    if (!in_bands) {
        const T *from = weights(table) + row * size;
        for (int64_t i = 0; i < size; ++i) out[i] = widen(from[i]) * factor;
        return;
    }
    constexpr int64_t group = Operands<T>::group;
    const T *from = row_in_band(weights(table), row, size);
    for (int64_t i = 0; i < size; i += group, from += kBand * group)
        for (int64_t j = 0; j < group; ++j) out[i + j] = widen(from[j]) * factor;
}

void normalise_to_x(const float *in, const float *scale, int64_t size, NormKind by, void *x) {
    normalise(in, scale, size, by, static_cast<X *>(x));
}
void activate_to_x(const Activation &by, const float *gate, const float *up, int64_t in_step, int64_t rows,
                   int64_t size, void *x, int64_t x_step) {
    activate(by, gate, up, in_step, rows, size, static_cast<X *>(x), x_step / int64_t(sizeof(X)));
}
void divide_to_x(const float *in, float by, int64_t count, void *x) {
    divide(in, by, count, static_cast<X *>(x));
}
void widen_x(const void *x, int64_t size, float *out) { widen_row(static_cast<const X *>(x), size, out); }

void normalise_to_state(const float *in, const float *scale, int64_t size, NormKind by, void *state) {
    normalise(in, scale, size, by, static_cast<T *>(state));
}
void copy_state(const void *state, int64_t size, void *x) {
    copy_row(weights(state), size, static_cast<X *>(x));
}
void widen_state(const void *state, int64_t size, float *out) { widen_row(weights(state), size, out); }

// ---- LoRA adapters -------------------------------------------------------------------------------

void shrink_by(const float *x, int64_t tokens, const void *down, int64_t from, int64_t to, int64_t columns,
               float *out, int64_t out_step) {
    shrink_rows(x, tokens, weights(down), from, to, columns, out, out_step);
}
void add_low_rank_band(const float *low, const void *up, int64_t band, int64_t rank, float scale, float *c) {
    add_low_rank(low, weights(up) + band * rank * kBand, rank, scale, c);
}
