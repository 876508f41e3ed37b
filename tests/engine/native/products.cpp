// Whether products.h multiplies what it says, for each type of weights; a program, so that an emulator can
// run it too. Ends with 1 and a line for the first product that is wrong.
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#include "products.h"

namespace {

float draw() { return float(std::rand()) / float(RAND_MAX) - 0.5f; }

template <class T> bool is_right(const char *name, int64_t rows, int64_t columns, int64_t length) {
    using X = typename Operands<T>::X;
    constexpr int64_t spare = 32;
    const int64_t x_step = length + 32;
    std::vector<T> w(banded_rows(columns) * length), packed(w.size());
    std::vector<X> x((rows + spare) * x_step);
    for (T &value : w) store(&value, draw());
    for (X &value : x) store(&value, draw());
    pack(packed.data(), w.data(), columns, length);
    const int64_t c_step = banded_rows(columns);
    std::vector<float> together((rows + spare) * c_step), alone((1 + spare) * c_step);
    const TileScope tiles;
    for (int64_t n = 0; n < columns; n += kBand)
        multiply_band<T>(x.data(), x_step, rows, packed.data() + n * length, length, true,
                         together.data() + n, c_step);
    for (int64_t row = 0; row < rows; ++row) {
        for (int64_t n = 0; n < columns; n += kBand)
            multiply_band<T>(x.data() + row * x_step, x_step, 1, packed.data() + n * length, length,
                             true, alone.data() + n, c_step);
        for (int64_t n = 0; n < columns; ++n) {
            double expected = 0;
            for (int64_t k = 0; k < length; ++k)
                expected += double(widen(x[row * x_step + k])) * double(widen(w[n * length + k]));
            const float result = together[row * c_step + n];
            if (std::abs(expected - result) < 1e-4 * std::sqrt(double(length)) && result == alone[n])
                continue;
            std::printf("%s: %ld rows, %ld columns, length %ld: row %ld, column %ld is %g, alone %g, "
                        "should be %g\n", name, long(rows), long(columns), long(length), long(row),
                        long(n), double(result), double(alone[n]), expected);
            return false;
        }
    }
    return true;
}

template <class T> bool all_right(const char *name) {
    for (int64_t length : {2, 30, 64, 130, 2086})
        for (int64_t rows : {1, 2, 3, 5, 8, 12, 13, 16, 17, 31, 33, 50})
            if (!is_right<T>(name, rows, rows % 2 ? 32 : 70, length)) return false;
    return true;
}

}  // namespace

int main() {
    return all_right<float>("float32") && all_right<f16>("float16") && all_right<bf16>("bfloat16") ? 0
                                                                                                  : 1;
}
