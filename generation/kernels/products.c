// Products of states by the weights of linear layers, in float32, bfloat16 and int8.

#define _DEFAULT_SOURCE
#include "products.h"

#include "finish.h"
#include "instructions.h"
#include "tiles.h"

// Define a function that multiplies rows of states by a panel (words, PANEL) of weights: sums
// (rows, PANEL). A word of 4 bytes has 4 values in int8, 2 in bfloat16 and 1 in float32, and
// `add(sums, state, weight)` adds its products to the sum of each lane.
#define DEFINE_MULTIPLY_ROWS(name, lanes, add)                                                     \
    INLINE void name(const int rows, const char *states, int64_t words, const vector *panel,       \
                     lanes *sums)                                                                  \
    {                                                                                              \
        lanes left[ROWS_AT_ONCE], right[ROWS_AT_ONCE];                                             \
        _Pragma("GCC unroll 12") for (int row = 0; row < rows; row++)                              \
            left[row] = right[row] = (lanes)in_all_lanes(0);                                       \
        for (int64_t word = 0; word < words; word++) {                                             \
            fetch(panel + 2 * word);                                                               \
            vector weight_left = panel[2 * word], weight_right = panel[2 * word + 1];              \
            IN_REGISTERS(weight_left, weight_right);                                               \
            _Pragma("GCC unroll 12") for (int row = 0; row < rows; row++)                          \
            {                                                                                      \
                int32_t values;                                                                    \
                memcpy(&values, states + (row * words + word) * 4, 4);                             \
                const vector state = in_all_lanes(values);                                         \
                left[row] = add(left[row], state, weight_left);                                    \
                right[row] = add(right[row], state, weight_right);                                 \
            }                                                                                      \
        }                                                                                          \
        _Pragma("GCC unroll 12") for (int row = 0; row < rows; row++)                              \
        {                                                                                          \
            sums[2 * row] = left[row];                                                             \
            sums[2 * row + 1] = right[row];                                                        \
        }                                                                                          \
    }

#define dot_floats(sums, state, weight) multiply_add((floats)(state), (floats)(weight), sums)
DEFINE_MULTIPLY_ROWS(multiply_integers, vector, dot)
DEFINE_MULTIPLY_ROWS(multiply_halves, floats, dot_halves)
DEFINE_MULTIPLY_ROWS(multiply_floats, floats, dot_floats)

// The number of rows must be known when this is compiled.
#define FOR_EACH_NUMBER_OF_ROWS(function, rows, ...)                                               \
    switch (rows) {                                                                                \
    case 1: function(1, __VA_ARGS__); break;                                                       \
    case 2: function(2, __VA_ARGS__); break;                                                       \
    case 3: function(3, __VA_ARGS__); break;                                                       \
    case 4: function(4, __VA_ARGS__); break;                                                       \
    case 5: function(5 % (ROWS_AT_ONCE + 1), __VA_ARGS__); break;                                  \
    case 6: function(6 % (ROWS_AT_ONCE + 1), __VA_ARGS__); break;                                  \
    case 7: function(7 % (ROWS_AT_ONCE + 1), __VA_ARGS__); break;                                  \
    case 8: function(8 % (ROWS_AT_ONCE + 1), __VA_ARGS__); break;                                  \
    case 9: function(9 % (ROWS_AT_ONCE + 1), __VA_ARGS__); break;                                  \
    case 10: function(10 % (ROWS_AT_ONCE + 1), __VA_ARGS__); break;                                \
    case 11: function(11 % (ROWS_AT_ONCE + 1), __VA_ARGS__); break;                                \
    case 12: function(12 % (ROWS_AT_ONCE + 1), __VA_ARGS__); break;                                \
    }

// Multiply rows of states by a panel. A function of its own has all registers for its loop.
static __attribute__((noinline)) void multiply_rows(const struct product *by, int rows,
                                                    const char *states, int64_t words,
                                                    const vector *panel, union sums *sums)
{
    if (by->sums) {
        FOR_EACH_NUMBER_OF_ROWS(multiply_integers, rows, states, words, panel,
                                (vector *)sums->integers)
    } else if (by->halves) {
        FOR_EACH_NUMBER_OF_ROWS(multiply_halves, rows, states, words, panel,
                                (floats *)sums->floats)
    } else {
        FOR_EACH_NUMBER_OF_ROWS(multiply_floats, rows, states, words, panel,
                                (floats *)sums->floats)
    }
}

// Round a row of states to integers from -largest to largest, and add `zero`. Returns their scale,
// which is NaN if a state is NaN or infinite.
static float round_row(const float *states, int64_t in, float largest, int zero, uint8_t *rounded)
{
    const float size = largest_magnitude(states, in);
    if (size != size) {
        memset(rounded, zero, (size_t)in);
        return size;
    }
    const float steps = largest / size;
    for (int64_t i = 0; i < in; i++)
        rounded[i] = (uint8_t)((int)__builtin_rintf(states[i] * steps) + zero);
    return size;
}

// Multiply rows of states (R, in): output (R, out).
void multiply(const struct product *by, const float *states, int64_t rows,
              const struct rounded *memory, float *output)
{
    if (by->digits) {
        multiply_digits(by, states, rows, memory, output);
        return;
    }
    const int64_t in = by->in;
    const int64_t weight_bytes = by->sums ? 1 : by->halves ? 2 : 4;
    const int at_once = by->sums ? INT8_ROWS_AT_ONCE : ROWS_AT_ONCE;
    const int rounds = by->sums || by->halves;
    if (rounds) {
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; row++) {
            if (by->halves)
                halve_row(states + row * in, in, (uint16_t *)memory->states + row * in);
            else
                memory->scales[row] =
                    round_row(states + row * in, in, (float)by->largest, by->largest + 1,
                              (uint8_t *)memory->states + row * in);
        }
    }
    const int tile = rounds ? begin_tiles(by, rows, in * weight_bytes) : 0;
#pragma omp for schedule(static)
    for (int64_t panel = 0; panel < (by->out + PANEL - 1) / PANEL; panel++) {
        const int64_t start = panel * PANEL;
        const char *weight = (const char *)by->panels + start * in * weight_bytes;
        const struct finish finish = prepare_finish(by, start);
        if (tile && by->halves)
            multiply_rows_in_tiles(1, tile, &finish, memory, rows, 2 * in, weight, output + start);
        else if (tile)
            multiply_rows_in_tiles(0, tile, &finish, memory, rows, in, weight, output + start);
        for (int64_t first = 0; first < rows && !tile; first += at_once) {
            const int count = rows - first < at_once ? (int)(rows - first) : at_once;
            const float *scales = by->sums ? memory->scales + first : NULL;
            union sums sums;
            const int64_t words = in * weight_bytes / 4;
            const char *part = (const char *)(rounds ? memory->states : states) + first * words * 4;
            multiply_rows(by, count, part, words, (const vector *)weight, &sums);
            finish_rows(&finish, count, &sums, scales, output + first * by->out + start);
        }
    }
    if (tile)
        end_tiles();
}

// Multiply rows of states (R, in) by a linear layer: output (R, out).
EXPORT void multiply_states(const struct product *by, const float *states, int64_t rows,
                            const struct rounded *memory, float *output, int threads)
{
#pragma omp parallel num_threads(threads)
    multiply(by, states, rows, memory, output);
}
