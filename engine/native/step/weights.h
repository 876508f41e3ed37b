// step.cpp calls this of the sources that know the types of weights, keys and values. It knows none itself: so it
// is compiled once, and linked with what a model needs.
//
// T is the type of weights, float, bfloat16 or float16; X that of activations which products with plain weights
// read: T where the processor multiplies that, else float. Rows of either are passed as void *.
#pragma once
#include <memory>
#include <string>

#include "native/attention/attention.h"
#include "rows.h"
#include "structs.h"

// ---- plain.cpp, for each T ----------------------------------------------------------------------

// The bytes of a number of T, and of X.
extern const int64_t kWeightBytes, kActivationBytes;

// c[i][0..32) = x_i . w, for rows of X that are x_step bytes apart, and one band of a matrix whose rows are
// `length` long.
void multiply_plain(const void *x, int64_t x_step, int64_t rows, const void *w, int64_t band,
                    int64_t length, float *c, int64_t c_step);
// c[i][0..count) += the bias of a band's rows.
void add_bias(const void *bias, int64_t band, int64_t count, int64_t rows, float *c, int64_t c_step);
// Names what computes products, for people to read.
std::string plain_products();

// A row of an embedding, times a factor. in_bands: whether that is packed as products want it.
void embed_row(const void *table, int64_t row, int64_t size, bool in_bands, float factor, float *out);

// Rows of X, as rows.h has them.
void normalise_to_x(const float *in, const float *scale, int64_t size, NormKind by, void *x);
void activate_to_x(const Activation &by, const float *gate, const float *up, int64_t in_step, int64_t rows,
                   int64_t size, void *x, int64_t x_step);
void divide_to_x(const float *in, float by, int64_t count, void *x);
void widen_x(const void *x, int64_t size, float *out);

// States, which are of T also where X is wider, so that the logits are the same if Python has them between.
void normalise_to_state(const float *in, const float *scale, int64_t size, NormKind by, void *state);
void copy_state(const void *state, int64_t size, void *x);
void widen_state(const void *state, int64_t size, float *out);

// As low_rank.h, of a change's A, and of one band of its B.
void shrink_by(const float *x, int64_t tokens, const void *down, int64_t from, int64_t to, int64_t columns,
               float *out, int64_t out_step);
void add_low_rank_band(const float *low, const void *up, int64_t band, int64_t rank, float scale, float *c);

// ---- attention.cpp, for each T, and for keys and values that are codes --------------------------

// max_rows: of a tile. value_dim: what is mixed of a position, where values are not stored the beginning of its key. A
// thread has one of its own.
std::unique_ptr<Attention> make_attention(int64_t max_rows, int64_t head_dim, int64_t value_dim);
// Names what multiplies codes, for people to read; empty where there are none.
std::string kv_products();
