// Products of rows of floats by packed weights, by their digits (`digits.h`).

#define _DEFAULT_SOURCE
#include "digits.h"

#if defined(HAS_TILES)
enum { BLOCKS = 8, STEPS = 4 };  // blocks and steps that fit a core's first cache
enum { IN_CACHE = 1 << 20 };     // bytes of states that fit its second cache

// Split a row of floats (in,) into digits. Tiles of the next inputs are `step` bytes apart, and tiles
// of the next digit `size` bytes. Returns the largest absolute value, or NaN if a float is NaN or
// infinite. Such a row has no digits.
INLINE float split_row(const float *values, int64_t in, int64_t step, int64_t size, int8_t *digits)
{
    const float largest = largest_magnitude(values, in);
    if (largest != largest)
        return largest;
    const double factor = LARGEST / largest;
    for (int64_t first = 0; first < in; first += TILE_BYTES, digits += step)
        for (int i = 0; i < TILE_BYTES; i++) {
            const int32_t whole = (int32_t)__builtin_rint(values[first + i] * factor);
            const int8_t low = (int8_t)whole;
            const int32_t higher = (whole - low) >> 8;
            const int8_t middle = (int8_t)higher;
            digits[i] = (int8_t)((higher - middle) >> 8);
            digits[size + i] = middle;
            digits[2 * size + i] = low;
        }
    return largest;
}

// Tell whether this CPU multiplies floats by their digits.
EXPORT int multiplies_digits(void) { return has_tiles; }

// Copy rows of a weight (rows, in) to panels (out / 16, in / 64, DIGITS, 16, 16, 4), from output `first`
// on. The scale of a row is written to scales (rows,). It is NaN if a weight is NaN or infinite.
EXPORT void pack_digits(const float *weight, int64_t rows, int64_t in, int8_t *panels, int64_t first,
                        float *scales, int threads)
{
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t row = 0; row < rows; row++) {
        int8_t digits[in * DIGITS];
        const float largest =
            split_row(weight + row * in, in, DIGITS * TILE_BYTES, TILE_BYTES, digits);
        scales[row] = (float)(largest * SCALE);
        const int64_t output = first + row;
        int8_t *place = panels + output / TILE_ROWS * in / TILE_BYTES * STEP + output % TILE_ROWS * 4;
        for (int64_t i = 0; i < in * DIGITS; i += 4)
            memcpy(place + i / TILE_BYTES * TILE + i % TILE_BYTES * TILE_ROWS, digits + i, 4);
    }
}

// Add the products of some steps of states and weights to sums, which the first steps begin.
INLINE void add_steps(const int8_t *states, const int8_t *weights, int64_t steps, int begins,
                      int fetches, sums_of_digits sums)
{
    if (begins) {
        begin_sums();
    } else {
        _tile_loadd(0, sums[0], TILE_BYTES);
        _tile_loadd(1, sums[1], TILE_BYTES);
        _tile_loadd(2, sums[2], TILE_BYTES);
        _tile_loadd(3, sums[3], TILE_BYTES);
    }
#pragma GCC unroll 4
    for (int64_t step = 0; step < steps; step++)
        add_step(states + step * STEP, weights + step * STEP, fetches);
    store_sums(sums);
}

// Join the sums of rows to floats (rows, PANEL), at 16 outputs of a panel.
INLINE void join_sums(sums_of_digits sums, int64_t rows, float *joined)
{
    for (int64_t row = 0; row < rows; row++)
        for (int i = 0; i < TILE_ROWS; i++) {
            const int64_t at = row * TILE_ROWS + i;
            const float high = (float)sums[0][at] * 256 + (float)sums[1][at];
            const float low = (float)sums[2][at] + (float)sums[3][at] / 256;
            joined[row * PANEL + i] = (high * 256 + low) * SHARE;
        }
}

// Multiply up to BLOCKS blocks of 16 rows by a panel: output (rows, out), at the panel's outputs.
static void multiply_blocks(const struct finish *finish, const int8_t *states, int64_t rows,
                            int64_t in, const int8_t *panel, int fetches, const float *scales,
                            float *output)
{
    const int64_t blocks = (rows + TILE_ROWS - 1) / TILE_ROWS, steps = in / TILE_BYTES;
    sums_of_digits sums[BLOCKS] __attribute__((aligned(64)));
    union sums joined[BLOCKS];
    for (int half = 0; half < PANEL / TILE_ROWS; half++, panel += steps * STEP) {
        for (int64_t step = 0; step < steps; step += STEPS)
            for (int64_t block = 0; block < blocks; block++)
                add_steps(states + (block * steps + step) * STEP, panel + step * STEP,
                          smaller(STEPS, steps - step), step == 0, fetches && block == 0,
                          sums[block]);
        for (int64_t block = 0; block < blocks; block++)
            join_sums(sums[block], smaller(TILE_ROWS, rows - block * TILE_ROWS),
                      joined[block].floats + half * TILE_ROWS);
    }
    for (int64_t block = 0; block < blocks; block++) {
        const int64_t first = block * TILE_ROWS;
        finish_rows(finish, (int)smaller(TILE_ROWS, rows - first), &joined[block], scales + first,
                    output + first * finish->out);
    }
}

void multiply_digits(const struct product *by, const float *states, int64_t rows,
                     const struct rounded *memory, float *output)
{
    if (rows == 0)
        return; // tiles without rows would be an error
    const int64_t in = by->in, row_bytes = in * DIGITS;
    int8_t *digits = memory->states;
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        int8_t *place = digits + row / TILE_ROWS * TILE_ROWS * row_bytes;
        memory->scales[row] = split_row(states + row * in, in, STEP, TILE,
                                        place + row % TILE_ROWS * TILE_BYTES);
    }
    const int64_t at_once = BLOCKS * TILE_ROWS; // rows
    const int64_t in_cache = IN_CACHE / row_bytes / at_once * at_once;
    const int64_t group = in_cache ? in_cache : at_once;
    set_tiles((int)smaller(TILE_ROWS, rows), 1);
    for (int64_t start = 0; start < rows; start += group) {
        const int64_t end = smaller(start + group, rows);
#pragma omp for schedule(static) nowait
        for (int64_t panel = 0; panel < (by->out + PANEL - 1) / PANEL; panel++) {
            const struct finish finish = prepare_finish(by, panel * PANEL);
            const int8_t *weights = (const int8_t *)by->panels + panel * PANEL * row_bytes;
            for (int64_t first = start; first < end; first += at_once)
                multiply_blocks(&finish, digits + first * row_bytes, smaller(at_once, end - first), in,
                                weights, first == start, memory->scales + first,
                                output + first * by->out + panel * PANEL);
        }
    }
    end_tiles();
#pragma omp barrier
}
#else
EXPORT int multiplies_digits(void) { return 0; }
EXPORT void pack_digits(const float *weight, int64_t rows, int64_t in, int8_t *panels, int64_t first,
                        float *scales, int threads)
{
}
void multiply_digits(const struct product *by, const float *states, int64_t rows,
                     const struct rounded *memory, float *output)
{
}
#endif
