// Products of matrices of floats, for training: in the tiles of AMX, by digits (`digits.h`).
//
// The inputs of a product are cut into groups, each with largest values of its own. Sums of a group
// have 32 bits, and are added to the output as floats. A row of the output depends neither on other
// rows nor on the number of threads.

#define _DEFAULT_SOURCE
#include "splits.h"

#include <omp.h>

#if defined(HAS_SPLITS)
enum { BLOCKS = 16 }; // blocks of rows that a thread splits at once, so that they fit its second cache

// Tell whether this CPU multiplies matrices by digits.
EXPORT int multiplies_matrices(void) { return has_tiles; }

// Matrices (rows, inputs) on one side of a product. If they lie by columns, their memory has
// (inputs, rows).
enum { MATRICES = 3 };
struct side {
    const float *values[MATRICES];
    int64_t rows[MATRICES];
    int32_t count, by_columns;
};

// Products of each left matrix by each right one. At least one side has a single matrix.
struct products_of_matrices {
    int64_t inputs;
    struct side left, right;
    const float *bias[MATRICES]; // of each right matrix (outs,), or NULL
    float *outputs[MATRICES];    // (rows, outs) of each product
    int32_t adds;                // add to the outputs, without the bias
};

// Where sums go: to `rows` rows of an output.
struct target {
    const int32_t (*sums)[TILE_ROWS * LANES];
    float *output;
    int64_t stride, rows;
    const float *scales; // of the rows
    floats scale, bias;  // of the outputs
    __mmask16 lanes;
    int adds;
};

// Join the sums of a row, and write them to the output or add them to it.
INLINE void finish_row(const struct target *to, int64_t row)
{
    floats sums[SUMS];
    for (int i = 0; i < SUMS; i++)
        sums[i] = _mm512_cvtepi32_ps(_mm512_load_si512(to->sums[i] + row * LANES));
    floats joined = _mm512_mul_ps(sums[3], float_in_all_lanes(SHARE / 256));
    joined = multiply_add(sums[2], float_in_all_lanes(SHARE), joined);
    joined = multiply_add(sums[1], float_in_all_lanes(SHARE * 256), joined);
    joined = multiply_add(sums[0], float_in_all_lanes(SHARE * 65536), joined);
    float *place = to->output + row * to->stride;
    const floats before = to->adds ? _mm512_maskz_loadu_ps(to->lanes, place) : to->bias;
    // The product of both scales alone may be too large for a float.
    joined = _mm512_mul_ps(joined, to->scale);
    joined = multiply_add(joined, float_in_all_lanes(to->scales[row]), before);
    _mm512_mask_storeu_ps(place, to->lanes, joined);
}

// Sum the products of some steps. A core can finish rows of `pending` while the tiles multiply.
static void sum_steps(const int8_t *left, const int8_t *right, int64_t steps, sums_of_digits sums,
                      const struct target *pending)
{
    const int64_t at_once = divide_up(pending->rows, steps);
    int64_t row = 0;
    begin_sums();
    for (int64_t step = 0; step < steps; step++) {
        add_step(left + step * STEP, right + step * STEP, 0);
        for (const int64_t end = smaller(row + at_once, pending->rows); row < end; row++)
            finish_row(pending, row);
    }
    store_sums(sums);
}

// A number of rows, as whole tiles.
INLINE int64_t in_tiles(int64_t rows) { return divide_up(rows, TILE_ROWS) * TILE_ROWS; }

// The group of inputs that begins at an input.
static struct part group_of(const struct products_of_matrices *by, int64_t input)
{
    return (struct part){.all_inputs = by->inputs,
                         .input = input,
                         .inputs = smaller(GROUP, by->inputs - input)};
}

// Number of parts of `size` rows in which the matrices of a side are.
static int64_t parts_of_side(const struct side *side, int64_t size)
{
    int64_t count = 0;
    for (int i = 0; i < side->count; i++)
        count += divide_up(side->rows[i], size);
    return count;
}

// Find a part of `size` rows. Returns the number of its matrix.
static int find_part(const struct side *side, int64_t size, int64_t number, struct part *part)
{
    int i = 0;
    for (; number >= divide_up(side->rows[i], size); i++)
        number -= divide_up(side->rows[i], size);
    part->values = side->values[i];
    part->all_rows = side->rows[i];
    part->row = number * size;
    part->rows = smaller(size, side->rows[i] - part->row);
    return i;
}

// Digits and scales of groups of inputs of the right matrices, one after the other, up to whole tiles.
struct right_digits {
    int64_t outs, groups; // of all matrices, and of inputs
    int8_t *digits;
    float *scales;
};

// The digits of a part of right matrix number `matrix`.
static struct right_digits digits_of(const struct right_digits *all, const struct side *right,
                                     int matrix, const struct part *part)
{
    int64_t out = part->row;
    for (int i = 0; i < matrix; i++)
        out += in_tiles(right->rows[i]);
    const int64_t group = part->input / GROUP % all->groups * all->outs;
    struct right_digits found = *all;
    found.digits += (group * GROUP + out * in_steps(part->inputs) * TILE_BYTES) * DIGITS;
    found.scales += group + out;
    return found;
}

// Memory of a thread, for rows of a left matrix.
struct of_thread {
    int8_t digits[BLOCKS * TILE_ROWS * GROUP * DIGITS];
    float scales[BLOCKS * TILE_ROWS];
    sums_of_digits sums[2];
} __attribute__((aligned(64)));

// Multiply rows of a left matrix by all right matrices, over one group of inputs.
static void multiply_part(const struct products_of_matrices *by, int matrix, const struct part *at,
                          const struct right_digits *all, struct of_thread *memory)
{
    int8_t *digits = memory->digits;
    float *scales = memory->scales;
    sums_of_digits *sums = memory->sums;
    const int64_t steps = in_steps(at->inputs);
    for (int64_t row = 0; row < at->rows; row += UNIT * TILE_ROWS) {
        struct part unit = *at;
        unit.row += row;
        unit.rows = smaller(UNIT * TILE_ROWS, at->rows - row);
        split_part(&unit, by->left.by_columns, 1, digits + row / TILE_ROWS * steps * STEP,
                   scales + row);
    }
    __asm__ volatile("" : : : "memory"); // GCC does not know that loads of tiles read the digits
    struct target pending = {.rows = 0};
    int turn = 0;
    for (int i = 0; i < by->right.count; i++) {
        const int64_t outs = by->right.rows[i];
        const float *bias = by->bias[i];
        float *output = by->outputs[by->left.count > 1 ? matrix : i] + at->row * outs;
        for (int64_t out = 0; out < outs; out += LANES) {
            const struct part outputs = {.row = out, .input = at->input, .inputs = at->inputs};
            const struct right_digits right = digits_of(all, &by->right, i, &outputs);
            struct target next = {.stride = outs, .lanes = lanes_of(outs - out)};
            next.adds = by->adds || at->input > 0;
            next.scale = _mm512_mul_ps(_mm512_load_ps(right.scales), float_in_all_lanes(SCALE));
            next.bias = bias ? read_lanes(bias + out, outs - out) : float_in_all_lanes(0);
            for (int64_t row = 0; row < at->rows; row += TILE_ROWS, turn = !turn) {
                sum_steps(digits + row / TILE_ROWS * steps * STEP, right.digits, steps, sums[turn],
                          &pending);
                pending = next;
                pending.sums = (const int32_t (*)[TILE_ROWS * LANES])sums[turn];
                pending.output = output + row * outs + out;
                pending.rows = smaller(TILE_ROWS, at->rows - row);
                pending.scales = scales + row;
            }
        }
    }
    for (int64_t row = 0; row < pending.rows; row++)
        finish_row(&pending, row);
}

// Number of bytes that a row of a right matrix or a thread needs for `multiply_matrices`.
EXPORT int bytes_of_row(void) { return GROUP * DIGITS + sizeof(float); }
EXPORT int bytes_of_thread(void) { return sizeof(struct of_thread); }

// Multiply matrices. The memory must hold what threads need, and one group of inputs of all right
// matrices, with rows filled up to whole tiles. More memory holds several groups, which saves passes
// over the outputs.
EXPORT void multiply_matrices(const struct products_of_matrices *by, int8_t *memory, int64_t size,
                              int threads)
{
    const struct side *left = &by->left, *right = &by->right;
    struct of_thread *of_threads = (struct of_thread *)memory;
    struct right_digits all = {.digits = memory + threads * bytes_of_thread()};
    for (int i = 0; i < right->count; i++)
        all.outs += in_tiles(right->rows[i]);
    all.groups = (size - threads * bytes_of_thread()) / all.outs / bytes_of_row();
    all.scales = (float *)(all.digits + all.groups * all.outs * GROUP * DIGITS);
    const int64_t blocks = parts_of_side(left, TILE_ROWS);
    // A thread multiplies its rows in several pieces, so that threads have equal numbers of rows.
    const int64_t of_thread = divide_up(blocks, threads), quarter = divide_up(of_thread, 4);
    const int64_t of_piece = quarter > UNIT ? smaller(quarter, BLOCKS) : smaller(of_thread, UNIT);
    const int64_t at_once = of_piece * TILE_ROWS;
    enum { OUTS = UNIT * TILE_ROWS };
#pragma omp parallel num_threads(threads)
    {
        set_tiles(TILE_ROWS, 1);
        for (int64_t first = 0; first < by->inputs; first += all.groups * GROUP) {
            const int64_t end = smaller(first + all.groups * GROUP, by->inputs);
            const int64_t units = parts_of_side(right, OUTS);
#pragma omp for schedule(static)
            for (int64_t unit = 0; unit < units * divide_up(end - first, GROUP); unit++) {
                struct part part = group_of(by, first + unit / units * GROUP);
                const int i = find_part(right, OUTS, unit % units, &part);
                const struct right_digits to = digits_of(&all, right, i, &part);
                split_part(&part, right->by_columns, 0, to.digits, to.scales);
            }
#pragma omp for schedule(static)
            for (int64_t piece = 0; piece < parts_of_side(left, at_once); piece++)
                for (int64_t input = first; input < end; input += GROUP) {
                    struct part part = group_of(by, input);
                    const int i = find_part(left, at_once, piece, &part);
                    multiply_part(by, i, &part, &all, of_threads + omp_get_thread_num());
                }
        }
        end_tiles();
    }
}
#else
EXPORT int multiplies_matrices(void) { return 0; }
EXPORT int bytes_of_row(void) { return 0; }
EXPORT int bytes_of_thread(void) { return 0; }
EXPORT void multiply_matrices(const void *by, int8_t *memory, int64_t size, int threads) {}
#endif
