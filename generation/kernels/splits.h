// Splits parts of matrices into digits (`digits.h`) in tiles, for products in training.

#pragma once
#include "digits.h"
#include "transpose.h"

#if defined(HAS_TILES) && defined(__AVX512VBMI__)
#define HAS_SPLITS
enum { GROUP = 512 }; // inputs with largest values of their own
enum { UNIT = 4 };    // blocks of 16 rows that are read at once, for whole lines of the cache
enum { AHEAD = 16 };  // inputs by which columns are fetched ahead

// Some rows and inputs of a matrix.
struct part {
    const float *values;
    int64_t all_rows, all_inputs; // of the matrix
    int64_t row, rows, input, inputs;
};

INLINE int64_t divide_up(int64_t whole, int64_t part) { return (whole + part - 1) / part; }

// Number of tiles of this many inputs.
INLINE int64_t in_steps(int64_t inputs) { return divide_up(inputs, TILE_BYTES); }

// A mask of the first `left` lanes, at most all of them.
INLINE __mmask16 lanes_of(int64_t left)
{
    return (__mmask16)(left >= LANES ? -1 : left > 0 ? (1 << left) - 1 : 0);
}

// Read a vector, with zeros beyond the floats that are left.
INLINE floats read_lanes(const float *values, int64_t left)
{
    return _mm512_maskz_loadu_ps(lanes_of(left), values);
}

// The bits of absolute values. Their order as integers is that of the values, and NaN comes last.
INLINE vector bits_of_size(floats values)
{
    return _mm512_and_si512(_mm512_castps_si512(values), in_all_lanes(0x7fffffff));
}

// Compute the factors that turn values into integers, and the scales that turn integers back, from the
// bits of the largest sizes. Both are NaN if a value is NaN or infinite.
INLINE void scale_by(vector bits, floats *factors, floats *scales)
{
    const vector infinite = in_all_lanes(0x7f800000), nan = in_all_lanes(0x7fc00000);
    bits = _mm512_mask_mov_epi32(bits, _mm512_cmpge_epi32_mask(bits, infinite), nan);
    const floats least_size = float_in_all_lanes(1e-30f); // so that no divisor is zero
    const floats sizes = larger(least_size, _mm512_castsi512_ps(bits));
    const float largest = (float)LARGEST - 1; // a rounded quotient does not exceed LARGEST
    *factors = _mm512_div_ps(float_in_all_lanes(largest), sizes);
    *scales = _mm512_mul_ps(sizes, float_in_all_lanes((float)(LARGEST / largest)));
}

// The digits of 16 values: a lane has the lowest one in its first byte, and zero in its last.
INLINE vector split(floats values, floats factors)
{
    // Bytes become digits from -128 to 127, with carries.
    const vector half = in_all_lanes(0x808080);
    const vector whole = _mm512_cvtps_epi32(_mm512_mul_ps(values, factors));
    return _mm512_xor_si512(_mm512_add_epi32(whole, half), half);
}

// Gather the digits of 64 values. digits[0] has the highest digit of each value.
INLINE void gather_digits(const vector values[4], vector digits[DIGITS])
{
    int8_t order[TILE_BYTES]; // of the bytes of a vector: quarters of each digit
    for (int i = 0; i < TILE_BYTES; i++)
        order[i] = (int8_t)(i % LANES * 4 + (i < 48 ? 2 - i / LANES : 3));
    vector places, quarters[4];
    memcpy(&places, order, sizeof(places));
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
        quarters[i] = _mm512_permutexvar_epi8(places, values[i]);
    const vector first = _mm512_shuffle_i32x4(quarters[0], quarters[1], 0x44);
    const vector second = _mm512_shuffle_i32x4(quarters[2], quarters[3], 0x44);
    digits[0] = _mm512_shuffle_i32x4(first, second, 0x88);
    digits[1] = _mm512_shuffle_i32x4(first, second, 0xdd);
    digits[2] = _mm512_shuffle_i32x4(_mm512_shuffle_i32x4(quarters[0], quarters[1], 0xee),
                                     _mm512_shuffle_i32x4(quarters[2], quarters[3], 0xee), 0x88);
}

// Take the bits of a mask from the first vector, and the others from the second one.
INLINE vector take_bits(uint32_t mask, vector first, vector second)
{
    enum { FIRST_WHERE_MASK = 0xca };
    return _mm512_ternarylogic_epi32(in_all_lanes((int)mask), first, second, FIRST_WHERE_MASK);
}

// Gather the digits of 4 values of each lane. digits[0] has the highest digit of each value.
INLINE void gather_fours(const vector values[4], vector digits[DIGITS])
{
    vector outer[2], middle[2]; // pairs of the lowest and highest digit, and of the middle one
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
        const vector first = values[2 * i], second = values[2 * i + 1];
        outer[i] = take_bits(0x00ff00ff, first, _mm512_slli_epi32(second, 8));
        middle[i] = take_bits(0x00ff00ff, _mm512_srli_epi32(first, 8), second);
    }
    digits[0] = take_bits(0x0000ffff, _mm512_srli_epi32(outer[0], 16), outer[1]);
    digits[1] = take_bits(0x0000ffff, middle[0], _mm512_slli_epi32(middle[1], 16));
    digits[2] = take_bits(0x0000ffff, outer[0], _mm512_slli_epi32(outer[1], 16));
}

// Split rows that lie in memory: each row of a tile has 64 inputs.
static void split_rows(const struct part *at, int8_t *tiles, float *scales)
{
    const int64_t steps = in_steps(at->inputs);
    for (int64_t row = 0; row < at->rows; row++) {
        const float *values = at->values + (at->row + row) * at->all_inputs + at->input;
        vector bits = in_all_lanes(0);
        for (int64_t i = 0; i < at->inputs; i += LANES)
            bits = _mm512_max_epi32(bits, bits_of_size(read_lanes(values + i, at->inputs - i)));
        floats factors, scale;
        scale_by(in_all_lanes(_mm512_reduce_max_epi32(bits)), &factors, &scale);
        scales[row] = _mm512_cvtss_f32(scale);
        int8_t *place = tiles + row / TILE_ROWS * steps * STEP + row % TILE_ROWS * TILE_BYTES;
        for (int64_t i = 0; i < at->inputs; i += TILE_BYTES, place += STEP) {
            vector split_values[4], digits[DIGITS];
#pragma GCC unroll 4
            for (int64_t part = 0; part < 4; part++) {
                const int64_t first = i + part * LANES;
                split_values[part] = split(read_lanes(values + first, at->inputs - first), factors);
            }
            gather_digits(split_values, digits);
            for (int digit = 0; digit < DIGITS; digit++)
                _mm512_store_si512(place + digit * TILE, digits[digit]);
        }
    }
}

// Split rows that lie in columns: each row of a tile has 4 inputs of 16 rows.
static void split_columns(const struct part *at, int8_t *tiles, float *scales)
{
    const int64_t steps = in_steps(at->inputs), stride = at->all_rows;
    const float *values = at->values + at->input * stride + at->row;
    vector bits[UNIT] = {in_all_lanes(0), in_all_lanes(0), in_all_lanes(0), in_all_lanes(0)};
    for (int64_t i = 0; i < at->inputs; i++)
        for (int64_t row = 0; row < at->rows; row += LANES) {
            const float *place = values + i * stride + row;
            __builtin_prefetch(place + AHEAD * stride);
            bits[row / LANES] =
                _mm512_max_epi32(bits[row / LANES], bits_of_size(read_lanes(place, at->rows - row)));
        }
    for (int64_t row = 0; row < at->rows; row += LANES, tiles += steps * STEP) {
        floats factors, scale;
        scale_by(bits[row / LANES], &factors, &scale);
        _mm512_storeu_ps(scales + row, scale);
        for (int64_t input = 0; input < steps * TILE_BYTES; input += 4) {
            vector split_values[4], digits[DIGITS];
#pragma GCC unroll 4
            for (int64_t i = input; i < input + 4; i++) {
                const int64_t left = i < at->inputs ? at->rows - row : 0;
                split_values[i - input] = split(read_lanes(values + i * stride + row, left), factors);
            }
            gather_fours(split_values, digits);
            int8_t *place = tiles + input / TILE_BYTES * STEP + input % TILE_BYTES * TILE_ROWS;
            for (int digit = 0; digit < DIGITS; digit++)
                _mm512_store_si512(place + digit * TILE, digits[digit]);
        }
    }
}

// Exchange rows and columns of a tile of 16 by 16 words.
static void transpose_tile(int8_t *tile)
{
    enum { HALF = 8, ROW = TILE_BYTES, SIDE = HALF * 4 };
    __m256 quarters[4][HALF];
    for (int i = 0; i < 4; i++) {
        for (int row = 0; row < HALF; row++)
            quarters[i][row] =
                _mm256_load_ps((float *)(tile + (i / 2 * HALF + row) * ROW + i % 2 * SIDE));
        transpose(quarters[i]);
    }
    for (int i = 0; i < 4; i++)
        for (int row = 0; row < HALF; row++)
            _mm256_store_ps((float *)(tile + (i % 2 * HALF + row) * ROW + i / 2 * SIDE),
                            quarters[i][row]);
}

// Split up to UNIT blocks of rows. Tiles of left matrices have rows, and those of right ones columns.
static void split_part(const struct part *at, int by_columns, int is_left, int8_t *tiles,
                       float *scales)
{
    if (by_columns)
        split_columns(at, tiles, scales);
    else
        split_rows(at, tiles, scales);
    if (by_columns != is_left)
        return;
    const int64_t count = divide_up(at->rows, TILE_ROWS) * in_steps(at->inputs) * DIGITS;
    for (int64_t tile = 0; tile < count; tile++)
        transpose_tile(tiles + tile * TILE);
}
#endif
