// Products of pairs of rows with pairs of columns, by the matrix instructions of ARM: bfmmla and smmla.
//
// Each multiplies a square of two rows by two columns, where bfdot and sdot multiply one row by four: twice the
// products for each number that is loaded. The manual defines a bfmmla as two bfdot after each other, rounded
// alike (to odd, where FPCR.EBF is 0), so the bits are those of a single row. Source: Arm Architecture
// Reference Manual for A-profile, BFMMLA and BFDOT.
#pragma once
#include "vectors.h"
#include "ways.h"

#if defined(__aarch64__) && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define PENSTOCK_PAIRED_ROWS 1
#endif
#if defined(__aarch64__) && defined(__ARM_FEATURE_MATMUL_INT8)
#define PENSTOCK_PAIRED_BYTES 1
#endif

#if defined(PENSTOCK_PAIRED_ROWS) || defined(PENSTOCK_PAIRED_BYTES)

// Instructions see this as two rows of eight bytes.
inline Words two_rows(const void *first, const void *second) {
    const auto row = [](const void *p) { return vld1_u8(static_cast<const unsigned char *>(p)); };
    return (Words)vcombine_u8(row(first), row(second));
}
// Two vectors have two words each of four columns; these take those of columns 0 and 1, and of 2 and 3.
inline Words left_columns(Words first, Words second) {
    return (Words)vzip1q_u32((uint32x4_t)first, (uint32x4_t)second);
}
inline Words right_columns(Words first, Words second) {
    return (Words)vzip2q_u32((uint32x4_t)first, (uint32x4_t)second);
}
// Squares of columns 0 and 1, and of 2 and 3, from their rows, and back.
template <class Vector> inline Vector first_halves(Vector left, Vector right) {
    return (Vector)vzip1q_u64((uint64x2_t)left, (uint64x2_t)right);
}
template <class Vector> inline Vector second_halves(Vector left, Vector right) {
    return (Vector)vzip2q_u64((uint64x2_t)left, (uint64x2_t)right);
}

#endif

#if defined(PENSTOCK_PAIRED_ROWS)

inline Floats add_square(Floats total, Words rows, Words columns) {
    return (Floats)vbfmmlaq_f32((float32x4_t)total, (bfloat16x8_t)rows, (bfloat16x8_t)columns);
}

inline bool may_pair_rows() { return !is_refused(kPairedRows); }

#endif
