// One step of a Llama-like model on CPU: token ids in, logits out, in a single call.
//
// At batch 1 a step is one pass over the weights, and it is as fast as memory only if nothing comes
// between two matrices: no interpreter, no repacking, no thread that waits long for another. So all
// layers run inside one parallel region, in phases separated by a short barrier. In each phase
// threads take the next unit of work from a counter; one that is preempted delays the rest by one
// unit only.
//
// The arithmetic is that of engine/models/llama.py, which runs where this cannot be compiled, and
// which this is tested against. Here the residual stream and all sums are float32; T, float, bfloat16
// or float16, is the type of weights, normalised activations, queries, keys and values.

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <omp.h>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

using std::int32_t;
using std::int64_t;

// ---- What Python passes; engine/native/model.py declares the same with ctypes -----------------

struct Linear {
    const void *weight;  // (rows, columns), row by row
    const void *bias;    // (rows) or null
    int64_t rows, columns;
};

struct Layer {
    const void *input_norm, *query_norm, *key_norm, *mlp_norm;  // query_norm, key_norm may be null
    Linear qkv, output, gate_up, down;
    void *keys, *values;  // (num_blocks, block_size, num_kv_heads, head_dim)
    int64_t window;       // positions that a token attends to, its own included; 0: all
};

struct Model {
    int64_t num_layers, hidden, heads, kv_heads, head_dim, mlp, block_size;
    double eps;
    const Layer *layers;
    const void *embedding, *norm;
    Linear lm_head;
    const float *cos, *sin;  // (positions, head_dim / 2)
};

struct Step {
    int64_t tokens, sequences, samples, max_blocks, threads;
    const int64_t *token_ids, *positions, *kv_slots, *sample_rows;
    const int32_t *block_tables, *query_starts;
    float *logits;  // (samples, vocabulary)
    void *states;   // (samples, hidden), of T, or null: see the functions at the end
};

namespace {

// ---- Vectors ------------------------------------------------------------------------------------

struct bf16 {
    std::uint16_t bits;
};
struct f16 {
    std::uint16_t bits;
};
typedef float Floats __attribute__((vector_size(64), aligned(4), may_alias));
typedef std::uint32_t Words __attribute__((vector_size(64)));
typedef std::uint16_t Halves __attribute__((vector_size(32), aligned(2), may_alias));
constexpr int kLanes = 16;

inline Floats load(const float *p) { return *reinterpret_cast<const Floats *>(p); }
inline Floats load(const bf16 *p) {
    Words wide = __builtin_convertvector(*reinterpret_cast<const Halves *>(p), Words) << 16;
    return (Floats)wide;
}
inline float widen(float x) { return x; }
inline float widen(bf16 x) {
    std::uint32_t bits = std::uint32_t(x.bits) << 16;
    float y;
    std::memcpy(&y, &bits, 4);
    return y;
}
inline void store(float *p, float x) { *p = x; }
inline void store(float *p, Floats x) { *reinterpret_cast<Floats *>(p) = x; }
template <class Bits> inline Bits rounded(Bits bits) {  // to nearest, ties to even, as torch does
    return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}
inline void store(bf16 *p, float x) {
    std::uint32_t bits;
    std::memcpy(&bits, &x, 4);
    p->bits = rounded(bits);
}
inline void store(bf16 *p, Floats x) {
    *reinterpret_cast<Halves *>(p) = __builtin_convertvector(rounded((Words)x), Halves);
}

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
#elif defined(__F16C__)
inline Floats load(const f16 *p) {
    const __m128i *bits = reinterpret_cast<const __m128i *>(p);
    const __m256 parts[] = {_mm256_cvtph_ps(_mm_loadu_si128(bits)),
                            _mm256_cvtph_ps(_mm_loadu_si128(bits + 1))};
    Floats x;
    std::memcpy(&x, parts, sizeof x);
    return x;
}
inline void store(f16 *p, Floats x) {
    __m256 parts[2];
    x = held_by_f16(x);
    std::memcpy(parts, &x, sizeof x);
    for (const __m256 &part : parts)
        _mm_storeu_si128(reinterpret_cast<__m128i *>(p) + (&part - parts),
                         _mm256_cvtps_ph(part, _MM_FROUND_TO_NEAREST_INT));
}
#elif defined(__aarch64__)
typedef __fp16 F16s __attribute__((vector_size(32), aligned(2), may_alias));
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

#ifdef __AVX512F__
inline __m256 halved(__m512 v) {
    __m512d bits = _mm512_castps_pd(v);
    return _mm256_add_ps(_mm512_castps512_ps256(v),
                         _mm256_castpd_ps(_mm512_extractf64x4_pd(bits, 1)));
}
// Transposed while being added: a third of the instructions of four separate sums.
inline void sums(Floats a, Floats b, Floats c, Floats d, float *out) {
    auto pairs = [](__m512 v, __m512 w) {
        return _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(v, w), _mm512_unpackhi_ps(v, w)));
    };
    __m512d ab = pairs(a, b), cd = pairs(c, d);
    __m256 eighths = halved(_mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd)),
                                          _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd))));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(eighths),
                                  _mm256_extractf128_ps(eighths, 1)));
}
#else
inline void sums(Floats a, Floats b, Floats c, Floats d, float *out) {
    for (Floats v : {a, b, c, d}) {
        *out = 0;
        for (int i = 0; i < kLanes; ++i) *out += v[i];
        ++out;
    }
}
#endif
// The same tree of additions as for four: a sum does not depend on what is summed with it.
inline float sum(Floats v) {
    float out[4];
    sums(v, v, v, v, out);
    return out[0];
}

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

// What one vector instruction multiplies: operands of T, accumulated in float32.
template <class T> struct Operand {
    using Vector = Floats;
    static constexpr int width = kLanes;
    static Vector read(const T *p) { return load(p); }
    static Floats add_product(Floats total, Vector a, Vector b) { return total + a * b; }
};
#ifdef __AVX512BF16__
template <> struct Operand<bf16> {
    using Vector = __m512bh;
    static constexpr int width = 32;
    static Vector read(const bf16 *p) { return (__m512bh)_mm512_loadu_si512(p); }
    static Floats add_product(Floats total, Vector a, Vector b) {
        return _mm512_dpbf16_ps(total, a, b);
    }
};
#endif

// Multiplied and added with one rounding, everywhere, whatever the compiler would choose.
template <class A, class B> inline float fused(A a, B b, float total) {
    return std::fma(widen(a), widen(b), total);
}

// A value to keep in a register: GCC 12 would otherwise reload it for each product.
template <class Vector> inline Vector keep(Vector v) {
#ifdef __AVX512F__
    asm("" : "+v"(v));
#endif
    return v;
}

// ---- Products of rows with rows -----------------------------------------------------------------
//
// Every dot product is summed in the same order, whatever tile it is computed in: lane by lane along
// k, then the tree of `sums`, then the remainder of k. So a token's result depends only on its own
// sequence: not on the other rows of the batch, and not on how a prompt is split into chunks.

// out[i][j] = x_i . w_j for R rows of x and C rows of w. Steps count elements between rows.
template <int R, int C, class T>
inline void dot_tile(const T *x, int64_t x_step, const T *w, int64_t w_step, int64_t length,
                     float (&out)[R][C]) {
    using Op = Operand<T>;
    Floats total[R][C] = {};
    int64_t k = 0;
    for (; k + Op::width <= length; k += Op::width) {
        typename Op::Vector columns[C];
        for (int j = 0; j < C; ++j) columns[j] = keep(Op::read(w + j * w_step + k));
        for (int i = 0; i < R; ++i) {
            auto row = keep(Op::read(x + i * x_step + k));
            for (int j = 0; j < C; ++j) total[i][j] = Op::add_product(total[i][j], row, columns[j]);
        }
    }
    Floats(&flat)[R * C] = reinterpret_cast<Floats(&)[R * C]>(total);
    float *const dots = &out[0][0];
    int n = 0;
    for (; n + 4 <= R * C; n += 4) sums(flat[n], flat[n + 1], flat[n + 2], flat[n + 3], dots + n);
    for (; n < R * C; ++n) dots[n] = sum(flat[n]);
    for (; k < length; ++k)
        for (int i = 0; i < R; ++i)
            for (int j = 0; j < C; ++j)
                out[i][j] = fused(x[i * x_step + k], w[j * w_step + k], out[i][j]);
}

// x . w_j for C rows of weights, each read as one stream, one after the other, which is the fastest
// way to read memory.
template <int C, class T>
inline void dot_streams(const T *x, const T *w, int64_t length, float *out) {
    using Op = Operand<T>;
    Floats total[4] = {};
    const int64_t whole = length / Op::width * Op::width;
    for (int j = 0; j < C; ++j) {
        const T *row = w + j * length;
        Floats running = {};
        for (int64_t k = 0; k < whole; k += Op::width)
            running = Op::add_product(running, Op::read(x + k), Op::read(row + k));
        total[j] = running;
    }
    float dots[4];
    sums(total[0], total[1], total[2], total[3], dots);
    for (int j = 0; j < C; ++j) {
        for (int64_t k = whole; k < length; ++k) dots[j] = fused(x[k], w[j * length + k], dots[j]);
        out[j] = dots[j];
    }
}

// For all rows of x and w: put(row, column, dot). Tiles of 4 x 4 keep the sums in registers.
template <int R, int C, class T, class Put>
inline void put_tile(const T *x, int64_t x_step, const T *w, int64_t w_step, int64_t length,
                     int64_t row, int64_t column, Put put) {
    float dots[R][C];
    dot_tile<R, C>(x + row * x_step, x_step, w + column * w_step, w_step, length, dots);
    for (int i = 0; i < R; ++i)
        for (int j = 0; j < C; ++j) put(row + i, column + j, dots[i][j]);
}

template <int R, class T, class Put>
inline void row_tiles(const T *x, int64_t x_step, const T *w, int64_t w_step, int64_t length,
                      int64_t row, int64_t columns, Put put) {
    int64_t column = 0;
    for (; column + 4 <= columns; column += 4)
        put_tile<R, 4>(x, x_step, w, w_step, length, row, column, put);
    for (; column < columns; ++column)
        put_tile<R, 1>(x, x_step, w, w_step, length, row, column, put);
}

template <class T, class Put>
inline void dot_rows(const T *x, int64_t x_step, int64_t rows, const T *w, int64_t w_step,
                     int64_t columns, int64_t length, Put put) {
    int64_t row = 0;
    for (; row + 4 <= rows; row += 4) row_tiles<4>(x, x_step, w, w_step, length, row, columns, put);
    for (; row + 2 <= rows; row += 2) row_tiles<2>(x, x_step, w, w_step, length, row, columns, put);
    for (; row < rows; ++row) row_tiles<1>(x, x_step, w, w_step, length, row, columns, put);
}

// ---- Threads ------------------------------------------------------------------------------------

// Spins for about ten microseconds, then sleeps: on a shared machine the thread that is waited for
// may need this core, and a sleeping thread resumes sooner than one that yielded.
class Barrier {
  public:
    // There may be fewer threads than requested.
    void expect(int64_t threads) { threads_ = threads; }
    void wait() {
        const int round = round_.load(std::memory_order_acquire);
        if (waiting_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads_) {
            waiting_.store(0, std::memory_order_relaxed);
            round_.fetch_add(1, std::memory_order_release);
            round_.notify_all();
            return;
        }
        for (int spins = 0; spins < 1000; ++spins) {
            if (round_.load(std::memory_order_acquire) != round) return;
#if defined(__x86_64__)
            _mm_pause();
#endif
        }
        round_.wait(round, std::memory_order_acquire);
    }

  private:
    int64_t threads_ = 1;
    alignas(64) std::atomic<int64_t> waiting_{0};
    alignas(64) std::atomic<int> round_{0};
};

// ---- The step -----------------------------------------------------------------------------------

template <class T> class Run {
  public:
    Run(const Model &model, const Step &step)
        : m_(model), s_(step), next_(new Counter[phases()]()),
          residual_(new float[step.tokens * model.hidden]), x_(new T[step.tokens * widest()]),
          wide_(new float[step.tokens * std::max(qkv_rows(), 2 * model.mlp)]) {
        int64_t group = m_.heads / m_.kv_heads;
        tile_ = std::max<int64_t>(1, 32 / group);
        for (int64_t i = 0; i < s_.sequences; ++i)
            for (int32_t first = s_.query_starts[i]; first < s_.query_starts[i + 1]; first += tile_)
                tiles_.push_back({i, first, std::min<int32_t>(first + tile_, s_.query_starts[i + 1])});
    }

    void expect(int64_t threads) { barrier_.expect(threads); }

    // Run by each thread.
    void thread() {
        int64_t phase = 0;
        for_each(phase, s_.tokens, [&](int64_t t) {
            const T *row = embedding() + s_.token_ids[t] * m_.hidden;
            for (int64_t i = 0; i < m_.hidden; ++i) residual(t)[i] = widen(row[i]);
        });
        std::vector<float> scratch(tile_ * m_.heads / m_.kv_heads * (m_.block_size + m_.head_dim + 2));
        for (int64_t l = 0; l < m_.num_layers; ++l) {
            const Layer &layer = m_.layers[l];
            normalise(phase, s_.tokens, layer.input_norm, [](int64_t t) { return t; }, x_.get());
            linear(phase, layer.qkv, x_.get(), s_.tokens, [&](int64_t t, int64_t n, float y) {
                wide_[t * qkv_rows() + n] = y;
            });
            for_each(phase, s_.tokens, [&](int64_t t) { rotate_and_store(layer, t); });
            for_each(phase, int64_t(tiles_.size()) * m_.kv_heads, [&](int64_t unit) {
                attend(layer, tiles_[unit / m_.kv_heads], unit % m_.kv_heads, scratch.data());
            });
            linear(phase, layer.output, x_.get(), s_.tokens,
                   [&](int64_t t, int64_t n, float y) { residual(t)[n] += y; });
            normalise(phase, s_.tokens, layer.mlp_norm, [](int64_t t) { return t; }, x_.get());
            gated_linear(phase, layer.gate_up);
            linear(phase, layer.down, hidden_mlp(), s_.tokens,
                   [&](int64_t t, int64_t n, float y) { residual(t)[n] += y; });
        }
        T *states = s_.states ? static_cast<T *>(s_.states) : x_.get();
        normalise(phase, s_.samples, m_.norm, [&](int64_t i) { return s_.sample_rows[i]; }, states);
        if (!s_.states) head(phase, states);
    }

    // Run by each thread when the states are given.
    void head_thread() {
        int64_t phase = 0;
        head(phase, static_cast<const T *>(s_.states));
    }

  private:
    struct alignas(64) Counter {
        std::atomic<int64_t> value{0};
    };
    struct Tile {  // tokens of one sequence that attend together
        int64_t sequence;
        int32_t first, end;
    };

    int64_t phases() const { return 8 * m_.num_layers + 3; }
    int64_t qkv_rows() const { return (m_.heads + 2 * m_.kv_heads) * m_.head_dim; }
    int64_t widest() const { return std::max(m_.hidden, m_.heads * m_.head_dim) + m_.mlp; }
    float *residual(int64_t t) { return residual_.get() + t * m_.hidden; }
    const T *embedding() const { return static_cast<const T *>(m_.embedding); }
    T *hidden_mlp() { return x_.get() + s_.tokens * std::max(m_.hidden, m_.heads * m_.head_dim); }

    // Runs work(unit) for every unit, each on the next free thread; then waits for all threads.
    template <class Work> void for_each(int64_t &phase, int64_t units, Work work) {
        std::atomic<int64_t> &next = next_[phase++].value;
        for (int64_t unit; (unit = next.fetch_add(1, std::memory_order_relaxed)) < units;) work(unit);
        barrier_.wait();
    }

    template <class RowOf>
    void normalise(int64_t &phase, int64_t rows, const void *weight, RowOf row_of, T *out) {
        const T *scale = static_cast<const T *>(weight);
        for_each(phase, rows, [&](int64_t i) {
            norm_row(residual(row_of(i)), scale, m_.hidden, out + i * m_.hidden);
        });
    }

    void head(int64_t &phase, const T *states) {
        linear(phase, m_.lm_head, states, s_.samples, [&](int64_t t, int64_t n, float y) {
            s_.logits[t * m_.lm_head.rows + n] = y;
        });
    }

    template <class Out> void norm_row(const float *in, const T *scale, int64_t size, Out *out) {
        Floats squares = {};
        int64_t i = 0;
        for (; i + kLanes <= size; i += kLanes) squares += load(in + i) * load(in + i);
        float total = sum(squares);
        for (; i < size; ++i) total += in[i] * in[i];
        float factor = 1.0f / std::sqrt(total / size + float(m_.eps));
        for (i = 0; i < size; ++i) store(out + i, in[i] * factor * widen(scale[i]));
    }

    // Units are consecutive weight rows: enough to stream, few enough to balance the load.
    int64_t unit_rows(int64_t rows) const {
        int64_t even = rows / (8 * s_.threads);
        return std::clamp<int64_t>(even / kLanes * kLanes, 16, 256);
    }

    template <class Put>
    void rows_times(const Linear &linear, const T *x, int64_t tokens, int64_t begin, int64_t end,
                    Put put) {
        const T *weight = static_cast<const T *>(linear.weight);
        const T *bias = static_cast<const T *>(linear.bias);
        auto write = [&](int64_t t, int64_t n, float y) {
            put(t, n, bias ? y + widen(bias[n]) : y);
        };
        if (tokens == 1) {
            float dots[4];
            int64_t n = begin;
            for (; n + 4 <= end; n += 4) {
                dot_streams<4>(x, weight + n * linear.columns, linear.columns, dots);
                for (int j = 0; j < 4; ++j) write(0, n + j, dots[j]);
            }
            for (; n < end; ++n) {
                dot_streams<1>(x, weight + n * linear.columns, linear.columns, dots);
                write(0, n, dots[0]);
            }
            return;
        }
        if (tokens <= 8) {
            // Still bound by memory: one row of weights at a time, as above.
            for (int64_t n = begin; n < end; ++n) {
                prefetch(weight + std::min(n + 4, end) * linear.columns,
                         weight + std::min(n + 5, end) * linear.columns);
                dot_rows(x, linear.columns, tokens, weight + n * linear.columns, linear.columns, 1,
                         linear.columns, [&](int64_t t, int64_t, float y) { write(t, n, y); });
            }
            return;
        }
        // A chunk of tokens stays in the L2 cache while the unit's weights are read, and four rows
        // of those stay in L1 while the chunk is read. The next rows are prefetched meanwhile, in
        // memory order.
        const int64_t fitting = (256 << 10) / int64_t(linear.columns * sizeof(T));
        const int64_t chunk = std::max<int64_t>(fitting / 4 * 4, 16);
        for (int64_t t = 0; t < tokens; t += chunk)
            for (int64_t n = begin; n < end; n += 4) {
                prefetch(weight + std::min(n + 8, end) * linear.columns,
                         weight + std::min(n + 12, end) * linear.columns);
                dot_rows(x + t * linear.columns, linear.columns, std::min(chunk, tokens - t),
                         weight + n * linear.columns, linear.columns, std::min<int64_t>(4, end - n),
                         linear.columns,
                         [&](int64_t i, int64_t j, float y) { write(t + i, n + j, y); });
            }
    }

    static void prefetch(const T *begin, const T *end) {
        for (const T *p = begin; p < end; p += 64 / sizeof(T)) __builtin_prefetch(p, 0, 2);
    }

    template <class Put>
    void linear(int64_t &phase, const Linear &linear, const T *x, int64_t tokens, Put put) {
        int64_t size = unit_rows(linear.rows);
        for_each(phase, (linear.rows + size - 1) / size, [&](int64_t unit) {
            int64_t begin = unit * size;
            rows_times(linear, x, tokens, begin, std::min(begin + size, linear.rows), put);
        });
    }

    // silu(gate) * up, by the thread that computed both.
    void gated_linear(int64_t &phase, const Linear &both) {
        int64_t size = unit_rows(m_.mlp), step = 2 * m_.mlp;
        auto put = [&](int64_t t, int64_t n, float y) { wide_[t * step + n] = y; };
        for_each(phase, (m_.mlp + size - 1) / size, [&](int64_t unit) {
            int64_t begin = unit * size, end = std::min(begin + size, m_.mlp);
            rows_times(both, x_.get(), s_.tokens, begin, end, put);
            rows_times(both, x_.get(), s_.tokens, m_.mlp + begin, m_.mlp + end, put);
            for (int64_t t = 0; t < s_.tokens; ++t) {
                float *gate = &wide_[t * step], *up = gate + m_.mlp;
                T *out = hidden_mlp() + t * m_.mlp;
                int64_t n = begin;
                for (; n + kLanes <= end; n += kLanes)
                    store(out + n, load(gate + n) / (1.0f + exp(-load(gate + n))) * load(up + n));
                for (; n < end; ++n)
                    store(out + n, gate[n] / (1.0f + std::exp(-gate[n])) * up[n]);
            }
        });
    }

    // Writes queries to x, keys and values to the pool.
    void rotate_and_store(const Layer &layer, int64_t t) {
        int64_t d = m_.head_dim, slot = s_.kv_slots[t] * m_.kv_heads * d;
        float *head = &wide_[t * qkv_rows()];
        for (int64_t h = 0; h < m_.heads; ++h, head += d)
            rotate(head, layer.query_norm, t, x_.get() + (t * m_.heads + h) * d);
        for (int64_t h = 0; h < m_.kv_heads; ++h, head += d)
            rotate(head, layer.key_norm, t, static_cast<T *>(layer.keys) + slot + h * d);
        T *values = static_cast<T *>(layer.values) + slot;
        for (int64_t i = 0; i < m_.kv_heads * d; ++i) store(values + i, head[i]);
    }

    void rotate(float *head, const void *norm, int64_t t, T *out) {
        int64_t half = m_.head_dim / 2;
        const float *cos = m_.cos + s_.positions[t] * half, *sin = m_.sin + s_.positions[t] * half;
        if (norm) norm_row(head, static_cast<const T *>(norm), m_.head_dim, head);
        for (int64_t i = 0; i < half; ++i) {
            float left = head[i], right = head[i + half];
            store(out + i, left * cos[i] - right * sin[i]);
            store(out + i + half, right * cos[i] + left * sin[i]);
        }
    }

    // One tile of queries with one KV head, block by block, by the online softmax of Milakov and
    // Gimelshein 2018 (arXiv:1805.02867). A query row is one token's query head of this KV head.
    // Overwrites the queries in x with what they attended to.
    void attend(const Layer &layer, const Tile &tile, int64_t kv_head, float *scratch) {
        const int64_t d = m_.head_dim, size = m_.block_size, group = m_.heads / m_.kv_heads;
        const int64_t kv_step = m_.kv_heads * d, rows = (tile.end - tile.first) * group;
        float *scores = scratch, *mixed = scores + rows * size;
        float *peak = mixed + rows * d, *weight = peak + rows;
        std::fill(mixed, mixed + rows * d, 0.0f);
        std::fill(peak, peak + rows, -INFINITY);
        std::fill(weight, weight + rows, 0.0f);
        const int32_t *table = s_.block_tables + tile.sequence * s_.max_blocks;
        const int64_t last = s_.positions[tile.end - 1];
        const int64_t oldest = first_visible(layer, s_.positions[tile.first]);
        const float scale = 1.0f / std::sqrt(float(d));
        for (int64_t block = oldest / size; block * size <= last; ++block) {
            const int64_t start = block * size, count = std::min(size, last + 1 - start);
            const int64_t offset = (table[block] * size * m_.kv_heads + kv_head) * d;
            const T *keys = static_cast<const T *>(layer.keys) + offset;
            const T *values = static_cast<const T *>(layer.values) + offset;
            if (start + size <= last) {  // the hardware does not prefetch the next block
                const int64_t next = (table[block + 1] * size * m_.kv_heads + kv_head) * d;
                const T *next_keys = static_cast<const T *>(layer.keys) + next;
                const T *next_values = static_cast<const T *>(layer.values) + next;
                for (int64_t row = 0; row < size * kv_step; row += kv_step) {
                    prefetch(next_keys + row, next_keys + row + d);
                    prefetch(next_values + row, next_values + row + d);
                }
            }
            for (int64_t token = tile.first; token < tile.end; ++token)
                dot_rows(query(token, kv_head), d, group, keys, kv_step, count, d,
                         [&](int64_t g, int64_t k, float dot) {
                             scores[((token - tile.first) * group + g) * size + k] = dot * scale;
                         });
            for (int64_t row = 0; row < rows; ++row) {
                const int64_t position = s_.positions[tile.first + row / group];
                const int64_t begin = std::max<int64_t>(first_visible(layer, position) - start, 0);
                const int64_t end = std::min(count, position + 1 - start);
                const float shrink =
                    soften(scores + row * size, begin, end, count, peak[row], weight[row]);
                for (int64_t i = 0; i < d; ++i) mixed[row * d + i] *= shrink;
            }
            int64_t row = 0;
            for (; row + 4 <= rows; row += 4)
                mix<4>(scores + row * size, count, values, kv_step, mixed + row * d);
            for (; row < rows; ++row)
                mix<1>(scores + row * size, count, values, kv_step, mixed + row * d);
        }
        for (int64_t row = 0; row < rows; ++row) {
            T *out = query(tile.first + row / group, kv_head) + row % group * d;
            for (int64_t i = 0; i < d; ++i) store(out + i, mixed[row * d + i] / weight[row]);
        }
    }

    // Turns one row's scores into weights, 0 for keys outside the mask. Returns the factor that
    // rescales what was accumulated before, so that the highest score so far has weight 1.
    static float soften(float *scores, int64_t begin, int64_t end, int64_t count, float &peak,
                        float &weight) {
        begin = std::min(begin, count);
        end = std::max(begin, end);
        std::fill(scores, scores + begin, 0.0f);
        std::fill(scores + end, scores + count, 0.0f);
        if (begin == end) return 1.0f;
        const float highest = std::max(peak, *std::max_element(scores + begin, scores + end));
        const float shrink = std::exp(peak - highest);
        peak = highest;
        weight *= shrink;
        int64_t k = begin;
        for (; k + kLanes <= end; k += kLanes) {
            Floats e = exp(load(scores + k) - highest);
            store(scores + k, e);
            weight += sum(e);
        }
        for (; k < end; ++k) weight += scores[k] = std::exp(scores[k] - highest);
        return shrink;
    }

    // Adds the weighted values of a block to what R query rows have accumulated so far.
    template <int R>
    void mix(const float *weights, int64_t count, const T *values, int64_t step, float *mixed) {
        const int64_t d = m_.head_dim, size = m_.block_size;
        int64_t i = 0;
        for (; i + kLanes <= d; i += kLanes) {
            Floats total[R];
            for (int r = 0; r < R; ++r) total[r] = load(mixed + r * d + i);
            for (int64_t k = 0; k < count; ++k) {
                const Floats value = load(values + k * step + i);
                for (int r = 0; r < R; ++r) total[r] += value * weights[r * size + k];
            }
            for (int r = 0; r < R; ++r) store(mixed + r * d + i, total[r]);
        }
        for (; i < d; ++i)
            for (int r = 0; r < R; ++r)
                for (int64_t k = 0; k < count; ++k)
                    mixed[r * d + i] =
                        fused(values[k * step + i], weights[r * size + k], mixed[r * d + i]);
    }

    T *query(int64_t token, int64_t kv_head) {
        return x_.get() + (token * m_.heads + kv_head * (m_.heads / m_.kv_heads)) * m_.head_dim;
    }
    int64_t first_visible(const Layer &layer, int64_t position) const {
        return layer.window ? std::max<int64_t>(position - layer.window + 1, 0) : 0;
    }

    const Model &m_;
    const Step &s_;
    Barrier barrier_;
    std::unique_ptr<Counter[]> next_;
    std::unique_ptr<float[]> residual_;
    std::unique_ptr<T[]> x_;         // normalised, then queries, then attention's output; and the MLP's activations
    std::unique_ptr<float[]> wide_;  // qkv, then gate and up
    int64_t tile_;
    std::vector<Tile> tiles_;
};

template <class T> void run(const Model &model, const Step &step, void (Run<T>::*thread)()) {
    Run<T> run(model, step);
#pragma omp parallel num_threads(step.threads)
    {
#pragma omp single
        run.expect(omp_get_num_threads());
        (run.*thread)();
    }
}

}  // namespace

// A whole step. If `states` is given, writes the last layer's normalised states and no logits.
extern "C" void penstock_step_float32(const Model *model, const Step *step) {
    run(*model, *step, &Run<float>::thread);
}
extern "C" void penstock_step_bfloat16(const Model *model, const Step *step) {
    run(*model, *step, &Run<bf16>::thread);
}
extern "C" void penstock_step_float16(const Model *model, const Step *step) {
    run(*model, *step, &Run<f16>::thread);
}

// Only the output layer: the logits of `samples` rows of `states`, in a step without tokens.
extern "C" void penstock_logits_float32(const Model *model, const Step *step) {
    run(*model, *step, &Run<float>::head_thread);
}
extern "C" void penstock_logits_bfloat16(const Model *model, const Step *step) {
    run(*model, *step, &Run<bf16>::head_thread);
}
extern "C" void penstock_logits_float16(const Model *model, const Step *step) {
    run(*model, *step, &Run<f16>::head_thread);
}
