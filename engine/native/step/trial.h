// A product by itself, as steps compute it: what engine/native/trial.py tries.
#pragma once
#include <ctime>

#include "linear.h"

namespace {

// y = x W^T + b for rows of x, (rows, columns); y is (rows + kSpare, banded rows of W). Returns the seconds that the
// products take this thread.
inline double try_product(const Linear &linear, const float *x, int64_t rows, float *y) {
    const auto now = [] {
        timespec time;
        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
        return double(time.tv_sec) + 1e-9 * double(time.tv_nsec);
    };
    const int64_t columns = linear.columns, width = banded_rows(linear.rows);
    const int64_t row_bytes = (columns * kActivationBytes + 63) / 64 * 64;
    const int64_t step = is_coded(linear) ? CodedRows::bytes(columns, linear.group) : row_bytes;
    Worker worker;
    Input in = {worker.coded.reserve((rows + kSpare) * step), step};
    if (is_coded(linear)) in.coded = CodedRows::at(in.x, columns, linear.group);
    for (int64_t t = 0; t < rows; ++t, x += columns) {
        unsigned char *to = const_cast<unsigned char *>(in.x) + t * step;
        is_coded(linear) ? LinearLayers::code(worker, linear, x, to) : divide_to_x(x, 1.0f, columns, to);
    }
    std::vector<float> c((rows + kSpare) * kBand);
    [[maybe_unused]] const TileScope tiles;
    double seconds = 0;
    for (int64_t band = 0; band < width / kBand; ++band) {
        const double began = now();
        LinearLayers::multiply(linear, in, 0, rows, band, c.data());
        seconds += now() - began;
        for (int64_t t = 0; t < rows; ++t) std::copy_n(&c[t * kBand], kBand, y + t * width + band * kBand);
    }
    return seconds;
}

}  // namespace
