// Kernels of decoding: a step of the decoder, and of the search, with few passes over memory.
// `kernels_vaswani.py` compiles this file for the CPU that it runs on, and has the same structures.
//
// A result for a row depends on that row alone: neither on other rows nor on the number of threads.
// Functions without EXPORT run in all threads of a parallel region, and divide their loops.
//
// Shapes: R rows of states (hypotheses), B sentences, K hypotheses of each, D = d_model, H heads,
// N positions of a cache, V entries of the vocabulary, C candidates of a sentence.

#define _DEFAULT_SOURCE
#include <immintrin.h>
#include <omp.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))

// ---------------------------------------------------------------------------------------------
// Threads
// ---------------------------------------------------------------------------------------------

static void *wait_for_mutex(void *mutex)
{
    pthread_mutex_lock(mutex);
    pthread_mutex_unlock(mutex);
    return NULL;
}

// Tell whether the system has room for more threads. OpenMP would end the process if it had none.
static int has_room(int threads)
{
    pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    pthread_t made[threads];
    int count = 0;
    pthread_mutex_lock(&mutex);
    while (count < threads && pthread_create(&made[count], NULL, wait_for_mutex, &mutex) == 0)
        count++;
    pthread_mutex_unlock(&mutex);
    for (int i = 0; i < count; i++)
        pthread_join(made[i], NULL);
    return count == threads;
}

static void *sleep_as_team(void *threads)
{
    int count = 0; // so that GCC does not remove the region
#pragma omp parallel num_threads((int)(intptr_t)threads)
#pragma omp atomic
    count++;
    for (;;)
        pause();
    return NULL;
}

// Let OpenMP's threads sleep soon when they wait for each other, from now on.
//
// GCC's OpenMP spins far less as soon as it has more threads than there are cores. This function
// therefore makes a second team, which sleeps, beside the team of `threads`.
EXPORT void let_threads_sleep(int threads)
{
    const int missing = omp_get_num_procs() - threads + 1;
    const int team = missing > 1 ? missing + 1 : 2;
    pthread_t thread;
    sigset_t all, before;
    sigfillset(&all); // the threads of Python handle signals
    pthread_sigmask(SIG_SETMASK, &all, &before);
    if (has_room(team + 1) &&
        pthread_create(&thread, NULL, sleep_as_team, (void *)(intptr_t)team) == 0)
        pthread_detach(thread);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

// ---------------------------------------------------------------------------------------------
// Products
// ---------------------------------------------------------------------------------------------

// A lane of a vector has a float, or an integer of 32 bits to which `dot` adds four products, or two
// bfloat16, of which `dot_halves` adds two products to a float. The sums of ROWS_AT_ONCE rows stay in
// registers.
#if defined(__AVX512VNNI__) && defined(__AVX512F__)
typedef __m512i vector;
typedef __m512 floats;
enum { ROWS_AT_ONCE = 12, INT8_ROWS_AT_ONCE = 12 };
#define dot(sum, states, weight) _mm512_dpbusd_epi32(sum, states, weight)
#define in_all_lanes(number) _mm512_set1_epi32(number)
#define multiply_add(left, right, sum) _mm512_fmadd_ps(left, right, sum)
#define float_in_all_lanes(number) _mm512_set1_ps(number)
#define larger(left, right) _mm512_max_ps(left, right)
#define sum_of_lanes(floats) _mm512_reduce_add_ps(floats)
#define first_halves(words) _mm512_castsi512_ps(_mm512_slli_epi32(words, 16))
#define second_halves(words) _mm512_castsi512_ps(_mm512_and_si512(words, in_all_lanes(~0xffff)))
#elif defined(__AVX2__) && defined(__FMA__)
typedef __m256i vector;
typedef __m256 floats;
enum { ROWS_AT_ONCE = 6 };
#if defined(__AVXVNNI__)
enum { INT8_ROWS_AT_ONCE = 6 };
#define dot(sum, states, weight) _mm256_dpbusd_avx_epi32(sum, states, weight)
#else
enum { INT8_ROWS_AT_ONCE = 4 }; // products in 16 bits take registers too
// Pairs of products are added in 16 bits first. States of 7 bits do not overflow there.
#define dot(sum, states, weight)                                                                   \
    _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(states, weight),                  \
                                            _mm256_set1_epi16(1)))
#endif
#define in_all_lanes(number) _mm256_set1_epi32(number)
#define multiply_add(left, right, sum) _mm256_fmadd_ps(left, right, sum)
#define float_in_all_lanes(number) _mm256_set1_ps(number)
#define larger(left, right) _mm256_max_ps(left, right)
#define first_halves(words) _mm256_castsi256_ps(_mm256_slli_epi32(words, 16))
#define second_halves(words) _mm256_castsi256_ps(_mm256_and_si256(words, in_all_lanes(~0xffff)))
INLINE float sum_of_lanes(floats lanes)
{
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(lanes), _mm256_extractf128_ps(lanes, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}
#else
#error "the kernels need AVX2 and FMA"
#endif
#if !defined(__AES__)
#error "the fingerprints of weights need AES"
#endif

#if defined(__AVX512BF16__) && defined(__AVX512F__) && defined(__AVX512VNNI__)
#define dot_halves(sum, states, weight) _mm512_dpbf16_ps(sum, (__m512bh)(states), (__m512bh)(weight))
#else
INLINE floats dot_halves(floats sum, vector states, vector weight)
{
    sum = multiply_add(second_halves(states), second_halves(weight), sum);
    return multiply_add(first_halves(states), first_halves(weight), sum);
}
#endif

enum { LANES = sizeof(vector) / 4, PANEL = 2 * LANES };

// Number of outputs in a panel of weights.
EXPORT int panel_width(void) { return PANEL; }

// A linear layer, or several that read the same states. Panels of weights are filled up with zeros.
struct product {
    int64_t in, out;
    const void *panels;  // (out / PANEL, in / k, PANEL, k): k is 4 in int8, 2 in bfloat16, 1 in float
    // For int8 weights, of all outputs of the panels. NULL if the weights are no integers.
    const int32_t *sums; // of each output's weights
    const float *scale;  // divided by `largest`
    const float *bias;   // (out,) or NULL
    int32_t largest;     // states are rounded to integers from -largest to largest
    int32_t relu, halves; // halves: the weights are bfloat16, and states are rounded to it
};

// Memory for rounded rows of states (R, in), and for the scale of each row (R,).
struct rounded {
    void *states; // bytes, or bfloat16 as uint16_t
    float *scales;
};

// Fetch weights that are used soon. Without this, a CPU waits for memory at each new page.
INLINE void fetch(const void *weights)
{
    enum { AHEAD = 2048, LINE = 64 }; // bytes
    for (int line = 0; line < 4 * PANEL; line += LINE)
        __builtin_prefetch((const char *)weights + AHEAD + line);
}

// Multiply rows of states by a panel (in / 4, PANEL, 4) of weights: sums (rows, PANEL).
INLINE void multiply_rows(const int rows, const uint8_t *states, int64_t in, const int8_t *panel,
                          int32_t *sums)
{
    vector left[ROWS_AT_ONCE], right[ROWS_AT_ONCE];
#pragma GCC unroll 12
    for (int row = 0; row < rows; row++)
        left[row] = right[row] = in_all_lanes(0);
    for (int64_t first = 0; first < in; first += 4) {
        const vector *weight = (const vector *)(panel + first * PANEL);
        fetch(weight);
        const vector weight_left = weight[0], weight_right = weight[1];
#pragma GCC unroll 12
        for (int row = 0; row < rows; row++) {
            int32_t four;
            memcpy(&four, states + row * in + first, 4);
            const vector state = in_all_lanes(four);
            left[row] = dot(left[row], state, weight_left);
            right[row] = dot(right[row], state, weight_right);
        }
    }
#pragma GCC unroll 12
    for (int row = 0; row < rows; row++) {
        ((vector *)(sums + row * PANEL))[0] = left[row];
        ((vector *)(sums + row * PANEL))[1] = right[row];
    }
}

// Multiply rows of states by a panel (in, PANEL) of float weights: sums (rows, PANEL).
INLINE void multiply_float_rows(const int rows, const float *states, int64_t in, const float *panel,
                                float *sums)
{
    floats left[ROWS_AT_ONCE], right[ROWS_AT_ONCE];
#pragma GCC unroll 12
    for (int row = 0; row < rows; row++)
        left[row] = right[row] = float_in_all_lanes(0);
    for (int64_t i = 0; i < in; i++) {
        const floats *weight = (const floats *)(panel + i * PANEL);
        fetch(weight);
        const floats weight_left = weight[0], weight_right = weight[1];
#pragma GCC unroll 12
        for (int row = 0; row < rows; row++) {
            const floats state = float_in_all_lanes(states[row * in + i]);
            left[row] = multiply_add(state, weight_left, left[row]);
            right[row] = multiply_add(state, weight_right, right[row]);
        }
    }
#pragma GCC unroll 12
    for (int row = 0; row < rows; row++) {
        ((floats *)(sums + row * PANEL))[0] = left[row];
        ((floats *)(sums + row * PANEL))[1] = right[row];
    }
}

// Multiply rows of bfloat16 states by a panel (in / 2, PANEL, 2) of weights: sums (rows, PANEL).
INLINE void multiply_half_rows(const int rows, const uint16_t *states, int64_t in,
                               const uint16_t *panel, float *sums)
{
    floats left[ROWS_AT_ONCE], right[ROWS_AT_ONCE];
#pragma GCC unroll 12
    for (int row = 0; row < rows; row++)
        left[row] = right[row] = float_in_all_lanes(0);
    for (int64_t first = 0; first < in; first += 2) {
        const vector *weight = (const vector *)(panel + first * PANEL);
        fetch(weight);
        const vector weight_left = weight[0], weight_right = weight[1];
#pragma GCC unroll 12
        for (int row = 0; row < rows; row++) {
            int32_t two;
            memcpy(&two, states + row * in + first, 4);
            const vector state = in_all_lanes(two);
            left[row] = dot_halves(left[row], state, weight_left);
            right[row] = dot_halves(right[row], state, weight_right);
        }
    }
#pragma GCC unroll 12
    for (int row = 0; row < rows; row++) {
        ((floats *)(sums + row * PANEL))[0] = left[row];
        ((floats *)(sums + row * PANEL))[1] = right[row];
    }
}

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

// Round a row of states to integers from -largest to largest, and add `zero`. Returns their scale,
// which is NaN if a state is NaN or infinite.
static float round_row(const float *states, int64_t in, float largest, int zero, uint8_t *rounded)
{
    const uint32_t infinity = 0x7f800000;
    uint32_t bits, highest = 0; // bits of sizes are ordered as the sizes are, and NaN comes last
    for (int64_t i = 0; i < in; i++) {
        memcpy(&bits, states + i, 4);
        bits &= 0x7fffffff;
        highest = bits > highest ? bits : highest;
    }
    if (highest >= infinity) {
        memset(rounded, zero, (size_t)in);
        return __builtin_nanf("");
    }
    float size;
    memcpy(&size, &highest, 4);
    size = size > 1e-30f ? size : 1e-30f; // zeros must not be divided by zero
    const float steps = largest / size;
    for (int64_t i = 0; i < in; i++)
        rounded[i] = (uint8_t)((int)__builtin_rintf(states[i] * steps) + zero);
    return size;
}

// Round a row of states to bfloat16, ties to even.
static void halve_row(const float *states, int64_t in, uint16_t *halves)
{
    for (int64_t i = 0; i < in; i++) {
        uint32_t bits;
        memcpy(&bits, states + i, 4);
        const uint32_t nearest = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        halves[i] = (uint16_t)(states[i] == states[i] ? nearest : 0x7fc0); // else NaN
    }
}

// How the sums of a panel become outputs.
struct finish {
    int32_t zeros[PANEL]; // what the `zero` of the states adds to sums of integers
    float scale[PANEL], bias[PANEL];
    float least; // 0 for ReLU
    int64_t out, width; // outputs of the layer, and of this panel without those that fill it up
};

INLINE struct finish prepare_finish(const struct product *by, int64_t start)
{
    struct finish finish = {.least = by->relu ? 0 : -__builtin_inff(), .out = by->out};
    finish.width = by->out - start < PANEL ? by->out - start : PANEL;
    if (by->bias)
        memcpy(finish.bias, by->bias + start, (size_t)finish.width * sizeof(float));
    for (int i = 0; i < PANEL && by->sums; i++) {
        finish.zeros[i] = (by->largest + 1) * by->sums[start + i];
        finish.scale[i] = by->scale[start + i];
    }
    return finish;
}

// Sums (rows, PANEL) of products: integers for int8, and otherwise floats.
enum { TILE_ROWS = 16 };
union sums {
    int32_t integers[TILE_ROWS * PANEL];
    float floats[TILE_ROWS * PANEL];
} __attribute__((aligned(64)));

// Finish sums, of integers for rows with `scales` or of floats, and write the outputs.
INLINE void finish_rows(const struct finish *by, const int rows, const union sums *sums,
                        const float *scales, float *output)
{
    for (int row = 0; row < rows; row++) {
        float products[PANEL];
        for (int i = 0; i < PANEL; i++) {
            const int at = row * PANEL + i;
            // The explicit operation keeps the order in which torch rounds.
            const float product =
                scales ? __builtin_fmaf((float)(sums->integers[at] - by->zeros[i]) * by->scale[i],
                                        scales[row], by->bias[i])
                       : sums->floats[at] + by->bias[i];
            products[i] = product < by->least ? by->least : product;
        }
        if (by->width == PANEL)
            memcpy(output + row * by->out, products, sizeof(products));
        else
            memcpy(output + row * by->out, products, (size_t)by->width * sizeof(float));
    }
}

// Tiles of AMX are registers of 16 rows of 64 bytes. A tile of weights has 16 outputs.
#if defined(__AMX_TILE__) && defined(__AMX_INT8__) && defined(__AMX_BF16__) &&                     \
    defined(__AVX512VNNI__) && !defined(NO_TILES)
enum { TILE_BYTES = 64, FEW_ROWS = 8 };

static int has_tiles;

// Linux gives a process tiles when it asks for them.
__attribute__((constructor)) static void ask_for_tiles(void)
{
    const long request = 0x1023, tiles = 18;
    has_tiles = syscall(SYS_arch_prctl, request, tiles) == 0;
}

// Begin to multiply rows of states in tiles. Returns the rows of a tile, or 0 to multiply without.
//
// A few rows of integers are faster without. Floats must not be, because their sums would be
// rounded differently.
static int begin_tiles(const struct product *by, int64_t rows, int64_t row_bytes)
{
    struct {
        uint8_t palette, unused[15];
        uint16_t bytes[16];
        uint8_t rows[16];
    } sizes = {.palette = 1};
    const int tile = rows < TILE_ROWS ? (int)rows : TILE_ROWS;
    const int few = by->sums ? FEW_ROWS : 0;
    if (!has_tiles || rows <= few || row_bytes % TILE_BYTES != 0)
        return 0; // tiles without rows would be an error
    for (int i = 0; i < 8; i++) { // 0 to 3 have sums, 4 and 5 states, 6 and 7 weights
        sizes.bytes[i] = TILE_BYTES;
        sizes.rows[i] = (uint8_t)(i < 6 ? tile : TILE_ROWS);
    }
    // GCC's own function declares that it reads 8 bytes, so GCC may drop the other sizes.
    __asm__ volatile("ldtilecfg %0" : : "m"(sizes));
    return tile;
}

static void end_tiles(void) { _tile_release(); }

#define dot_tiles(halves, sums, states, weight)                                                    \
    if (halves)                                                                                    \
        _tile_dpbf16ps(sums, states, weight);                                                      \
    else                                                                                           \
        _tile_dpbusd(sums, states, weight)

// Multiply one or two tiles of states, with rows of `row_bytes`, by a panel: sums of each tile.
INLINE void multiply_tiles(const int tiles, const int halves, const char *first, const char *second,
                           int64_t row_bytes, const char *panel, union sums sums[2])
{
    enum { ROW = 4 * PANEL }; // bytes of a row of the panel, or of the sums
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t i = 0; i < row_bytes; i += TILE_BYTES) {
        _tile_loadd(6, (panel + i * PANEL), ROW);
        _tile_loadd(7, (panel + i * PANEL + TILE_BYTES), ROW);
        _tile_loadd(4, (first + i), row_bytes);
        dot_tiles(halves, 0, 4, 6);
        dot_tiles(halves, 1, 4, 7);
        if (tiles == 2) {
            _tile_loadd(5, (second + i), row_bytes);
            dot_tiles(halves, 2, 5, 6);
            dot_tiles(halves, 3, 5, 7);
        }
    }
    _tile_stored(0, sums[0].integers, ROW);
    _tile_stored(1, (sums[0].integers + LANES), ROW); // early versions of GCC need the brackets
    if (tiles == 2) {
        _tile_stored(2, sums[1].integers, ROW);
        _tile_stored(3, (sums[1].integers + LANES), ROW);
    }
}

// Multiply rows of states by a panel: output (R, out), at the panel's outputs.
INLINE void multiply_rows_in_tiles(const int halves, const int tile, const struct finish *finish,
                                   const struct rounded *by, int64_t rows, int64_t row_bytes,
                                   const char *panel, float *output)
{
    union sums sums[2];
    const char *states = by->states;
    for (int64_t first = 0; first < rows; first += 2 * tile) {
        // Every tile is whole. The last one may therefore repeat rows of another.
        const int64_t second = first + 2 * tile <= rows ? first + tile : rows - tile;
        const int tiles = first < second ? 2 : 1;
        const int64_t starts[2] = {tiles == 2 ? first : second, second};
        if (tiles == 2)
            multiply_tiles(2, halves, states + first * row_bytes, states + second * row_bytes,
                           row_bytes, panel, sums);
        else
            multiply_tiles(1, halves, states + second * row_bytes, NULL, row_bytes, panel, sums);
        for (int i = 0; i < tiles; i++)
            finish_rows(finish, tile, &sums[i], halves ? NULL : by->scales + starts[i],
                        output + starts[i] * finish->out);
    }
}
#else
static int begin_tiles(const struct product *by, int64_t rows, int64_t row_bytes) { return 0; }
static void end_tiles(void) {}
static void multiply_rows_in_tiles(const int halves, const int tile, const struct finish *finish,
                                   const struct rounded *by, int64_t rows, int64_t row_bytes,
                                   const char *panel, float *output)
{
}
#endif

// Multiply rows of states (R, in): output (R, out).
static void multiply(const struct product *by, const float *states, int64_t rows,
                     const struct rounded *memory, float *output)
{
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
            if (by->sums) {
                FOR_EACH_NUMBER_OF_ROWS(multiply_rows, count,
                                        (const uint8_t *)memory->states + first * in, in,
                                        (const int8_t *)weight, sums.integers)
            } else if (by->halves) {
                FOR_EACH_NUMBER_OF_ROWS(multiply_half_rows, count,
                                        (const uint16_t *)memory->states + first * in, in,
                                        (const uint16_t *)weight, sums.floats)
            } else {
                FOR_EACH_NUMBER_OF_ROWS(multiply_float_rows, count, states + first * in, in,
                                        (const float *)weight, sums.floats)
            }
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

// ---------------------------------------------------------------------------------------------
// LayerNorm (section 3.1)
// ---------------------------------------------------------------------------------------------

struct norm {
    const float *weight, *bias; // (D,)
    float epsilon;
};

// Add an update (R, D), if there is one, to states, and normalise each row: output (R, D).
static void add_and_normalise(const struct norm *by, const float *states, const float *update,
                              int64_t rows, int64_t width, float *output)
{
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        const float *left = states + row * width, *right = update ? update + row * width : NULL;
        float *sum = output + row * width;
        float mean = 0, variance = 0;
        for (int64_t i = 0; i < width; i++)
            sum[i] = right ? left[i] + right[i] : left[i];
        for (int64_t i = 0; i < width; i++)
            mean += sum[i];
        mean /= (float)width;
        for (int64_t i = 0; i < width; i++)
            variance += (sum[i] - mean) * (sum[i] - mean);
        const float factor = 1 / __builtin_sqrtf(variance / (float)width + by->epsilon);
        for (int64_t i = 0; i < width; i++)
            sum[i] = (sum[i] - mean) * factor * by->weight[i] + by->bias[i];
    }
}

static void add(float *states, const float *update, int64_t count)
{
#pragma omp for schedule(static)
    for (int64_t i = 0; i < count; i++)
        states[i] += update[i];
}

// ---------------------------------------------------------------------------------------------
// Attention (section 3.2.1, equation 1)
// ---------------------------------------------------------------------------------------------

// e^x of x <= 0, to the last bit or two: 2^n e^r with |r| <= ln(2) / 2.
INLINE float exponential(float x)
{
    x = x > -87 ? x : -87;
    const float n = __builtin_rintf(x * 1.44269504f);
    float r = __builtin_fmaf(n, -0.693359375f, x);
    r = __builtin_fmaf(n, 2.12194440e-4f, r);
    float power = 1.9875691500e-4f;
    power = __builtin_fmaf(power, r, 1.3981999507e-3f);
    power = __builtin_fmaf(power, r, 8.3334519073e-3f);
    power = __builtin_fmaf(power, r, 4.1665795894e-2f);
    power = __builtin_fmaf(power, r, 1.6666665459e-1f);
    power = __builtin_fmaf(power, r, 5.0000001201e-1f);
    power = __builtin_fmaf(power * r, r, r) + 1;
    const int32_t bits = ((int32_t)n + 127) << 23;
    float scale;
    memcpy(&scale, &bits, 4);
    return power * scale;
}

// The largest value, and at least -3e38.
INLINE float maximum(const float *values, int64_t count)
{
    floats part, parts = float_in_all_lanes(-3e38f);
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        memcpy(&part, values + i, sizeof(part));
        parts = larger(part, parts);
    }
    float lanes[LANES], highest = -3e38f;
    memcpy(lanes, &parts, sizeof(parts));
    for (int lane = 0; lane < LANES; lane++)
        highest = lanes[lane] > highest ? lanes[lane] : highest;
    for (; i < count; i++)
        highest = values[i] > highest ? values[i] : highest;
    return highest;
}

enum { PART = 1 << 16 }; // bytes that a thread compares at a time

// Tell whether two arrays have the same bytes.
EXPORT int same_bytes(const char *left, const char *right, int64_t count, int threads)
{
    int differ = 0;
#pragma omp parallel for schedule(static) num_threads(threads) reduction(| : differ)               \
    if (count > 4 * PART)
    for (int64_t first = 0; first < count; first += PART) {
        const int64_t size = count - first < PART ? count - first : PART;
        differ |= !differ && memcmp(left + first, right + first, (size_t)size) != 0;
    }
    return !differ;
}

// Transpose 8 rows of 8 words.
INLINE void transpose(__m256 tile[8])
{
    __m256 pairs[8], fours[8];
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
        pairs[i] = _mm256_unpacklo_ps(tile[i], tile[i + 1]);
        pairs[i + 1] = _mm256_unpackhi_ps(tile[i], tile[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        const int pair = i / 2 * 4 + i % 2;
        fours[2 * i] = _mm256_shuffle_ps(pairs[pair], pairs[pair + 2], 0x44);
        fours[2 * i + 1] = _mm256_shuffle_ps(pairs[pair], pairs[pair + 2], 0xee);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        tile[i] = _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x20);
        tile[i + 4] = _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x31);
    }
}

// Copy rows of a weight (rows, words) to panels (out / PANEL, words, PANEL), from output `first` on.
// A word is a float, two bfloat16 or four int8.
EXPORT void pack_rows(const char *weight, int64_t rows, int64_t words, int32_t *panels,
                      int64_t first, int threads)
{
    enum { FEW = 1 << 14 }; // words, for which several threads are not worth it
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * words > FEW)
    for (int64_t panel = first / PANEL; panel <= (first + rows - 1) / PANEL; panel++) {
        const int64_t begin = first > panel * PANEL ? first : panel * PANEL;
        const int64_t end = first + rows < (panel + 1) * PANEL ? first + rows : (panel + 1) * PANEL;
        const int64_t lanes = end - begin, whole_lanes = lanes / 8 * 8;
        const int64_t whole_words = words / 8 * 8;
        const char *source = weight + (begin - first) * words * 4;
        int32_t *place = panels + panel * PANEL * words + begin % PANEL;
        for (int64_t word = 0; word < whole_words; word += 8)
            for (int64_t lane = 0; lane < whole_lanes; lane += 8) {
                __m256 tile[8];
#pragma GCC unroll 8
                for (int i = 0; i < 8; i++)
                    tile[i] = _mm256_loadu_ps(
                        (const float *)(source + ((lane + i) * words + word) * 4));
                transpose(tile);
#pragma GCC unroll 8
                for (int i = 0; i < 8; i++)
                    _mm256_storeu_ps((float *)(place + (word + i) * PANEL + lane), tile[i]);
            }
        for (int64_t lane = 0; lane < lanes; lane++)
            for (int64_t word = lane < whole_lanes ? whole_words : 0; word < words; word++)
                memcpy(place + word * PANEL + lane, source + (lane * words + word) * 4, 4);
    }
}

// A fingerprint of a weight has a digest of each part.
enum { DIGEST_BYTES = 128 };
struct digest {
    __m128i lanes[DIGEST_BYTES / 16];
};

// Mix 128 bytes into a digest: each block of 16 is the key of a round of AES in its lane.
INLINE void mix(struct digest *digest, const char *bytes)
{
#pragma GCC unroll 8
    for (int lane = 0; lane < DIGEST_BYTES / 16; lane++) {
        const __m128i block = _mm_loadu_si128((const __m128i *)(bytes + 16 * lane));
        digest->lanes[lane] = _mm_aesenc_si128(digest->lanes[lane], block);
    }
}

INLINE struct digest digest_of(const char *bytes, int64_t count)
{
    enum { AHEAD = 1 << 12 }; // bytes
    struct digest digest = {{_mm_set_epi64x(0, count)}};
    int64_t i = 0;
    for (; i + DIGEST_BYTES <= count; i += DIGEST_BYTES) {
        for (int64_t line = 0; line < DIGEST_BYTES; line += 64)
            __builtin_prefetch(bytes + i + AHEAD + line, 0, 2); // it may pass the end
        mix(&digest, bytes + i);
    }
    char rest[DIGEST_BYTES] = {0};
    memcpy(rest, bytes + i, (size_t)(count - i));
    mix(&digest, rest);
    return digest;
}

// Write the fingerprint (parts, DIGEST_BYTES) of a weight, or return whether it differs.
//
// A change of one block always shows, because a round of AES maps digests one to one. A later change
// in the same lane hides it only if all of its bytes, at least 4, have the values that cancel it.
INLINE int visit_parts(const int writes, const char *weight, int64_t count, char *digests,
                       int threads)
{
    int differ = 0;
#pragma omp parallel for schedule(static) num_threads(threads) reduction(| : differ)               \
    if (count > 4 * PART)
    for (int64_t first = 0; first < count; first += PART) {
        const int64_t size = count - first < PART ? count - first : PART;
        const struct digest digest = digest_of(weight + first, size);
        char *place = digests + first / PART * DIGEST_BYTES;
        if (writes)
            memcpy(place, &digest, DIGEST_BYTES);
        else
            differ |= memcmp(place, &digest, DIGEST_BYTES) != 0;
    }
    return differ;
}

EXPORT void take_fingerprint(const char *weight, int64_t count, char *digests, int threads)
{
    visit_parts(1, weight, count, digests, threads);
}

EXPORT int has_fingerprint(const char *weight, int64_t count, char *digests, int threads)
{
    return !visit_parts(0, weight, count, digests, threads);
}

// List the positions (lists, N) whose mask (lists, N), of rows `stride` apart, is 0.
EXPORT void list_positions(const float *mask, int64_t lists, int64_t positions, int64_t stride,
                           int32_t *places, int32_t *counts)
{
    for (int64_t list = 0; list < lists; list++) {
        int32_t count = 0;
        for (int64_t i = 0; i < positions; i++) {
            places[list * positions + count] = (int32_t)i;
            count += mask[list * stride + i] == 0;
        }
        counts[list] = count;
    }
}

INLINE float scalar_product(const float *left, const float *right, int64_t count)
{
    floats even = float_in_all_lanes(0), odd = even;
    int64_t i = 0;
    for (; i + 2 * LANES <= count; i += 2 * LANES) {
        floats parts[4];
        memcpy(parts, left + i, 2 * sizeof(floats));
        memcpy(parts + 2, right + i, 2 * sizeof(floats));
        even = multiply_add(parts[0], parts[2], even);
        odd = multiply_add(parts[1], parts[3], odd);
    }
    float sum = sum_of_lanes(even + odd);
    for (; i < count; i++)
        sum += left[i] * right[i];
    return sum;
}

// Sum the listed values (N, d), each times its weight: output (d,).
INLINE void weighted_sum(const float *weights, const float *values, const int32_t *places,
                         int32_t count, int64_t width, float *output)
{
    enum { AT_ONCE = 4 };
    int64_t first = 0;
    for (; first + AT_ONCE * LANES <= width; first += AT_ONCE * LANES) {
        floats sums[AT_ONCE], parts[AT_ONCE];
        for (int part = 0; part < AT_ONCE; part++)
            sums[part] = float_in_all_lanes(0);
        for (int32_t i = 0; i < count; i++) {
            memcpy(parts, values + places[i] * width + first, sizeof(parts));
            const floats weight = float_in_all_lanes(weights[i]);
            for (int part = 0; part < AT_ONCE; part++)
                sums[part] = multiply_add(weight, parts[part], sums[part]);
        }
        memcpy(output + first, sums, sizeof(sums));
    }
    for (; first < width; first++) {
        float sum = 0;
        for (int32_t i = 0; i < count; i++)
            sum += weights[i] * values[places[i] * width + first];
        output[first] = sum;
    }
}

// One head of one hypothesis: softmax(q K^T / sqrt(d_k)) V over the listed positions.
INLINE void attend_once(const float *query, const float *keys, const float *values,
                        const int32_t *places, int32_t count, int64_t d_k, int64_t d_v,
                        float scaling, float *scores, float *output)
{
    float total = 0;
    for (int32_t i = 0; i < count; i++)
        scores[i] = scalar_product(query, keys + places[i] * d_k, d_k) * scaling;
    const float highest = maximum(scores, count);
    for (int32_t i = 0; i < count; i++)
        scores[i] = exponential(scores[i] - highest);
    for (int32_t i = 0; i < count; i++)
        total += scores[i];
    for (int32_t i = 0; i < count; i++)
        scores[i] /= total;
    weighted_sum(scores, values, places, count, d_v, output);
}

// Keys and values (B, H, N, d), each sentence and head at strides that count values.
struct cache {
    float *keys, *values;
    int64_t key_sentence, key_head, value_sentence, value_head;
    float scaling; // 1 / sqrt(d_k)
};

// Positions that hypotheses see: the first `counts` of places (lists, longest).
// `hypotheses_per_list` hypotheses share a list.
struct positions {
    const int32_t *places, *counts;
    int64_t longest, hypotheses_per_list;
};

// The hypotheses of a step, or the tokens of an encoder's sentences.
struct batch {
    int64_t rows, beams, width, heads, d_k, d_v; // R, K, D, H
    const int64_t *hypotheses;                   // (R,) their numbers among B * K, or NULL for all
    int64_t used;                                // positions of the past that are taken
    struct positions past, source;
};

// Store new keys and values at position `used` + the hypothesis' number in its sentence.
//
// They follow the queries of their row of `inner` (R, H d_k + H d_k + H d_v).
static void store(const struct batch *batch, const float *inner, const struct cache *cache)
{
    const int64_t d_k = batch->d_k, d_v = batch->d_v, heads = batch->heads;
#pragma omp for schedule(static)
    for (int64_t row = 0; row < batch->rows; row++) {
        const int64_t hypothesis = batch->hypotheses ? batch->hypotheses[row] : row;
        const int64_t sentence = hypothesis / batch->beams;
        const int64_t place = batch->used + hypothesis % batch->beams;
        const float *new_keys = inner + row * heads * (2 * d_k + d_v) + heads * d_k;
        const float *new_values = new_keys + heads * d_k;
        float *keys = cache->keys + sentence * cache->key_sentence + place * d_k;
        float *values = cache->values + sentence * cache->value_sentence + place * d_v;
        for (int64_t head = 0; head < heads; head++) {
            memcpy(keys + head * cache->key_head, new_keys + head * d_k,
                   (size_t)d_k * sizeof(float));
            memcpy(values + head * cache->value_head, new_values + head * d_v,
                   (size_t)d_v * sizeof(float));
        }
    }
}

// Attend from queries (R, H d_k), `stride` apart, to a cache: output (R, H d_v).
//
// A hypothesis that sees nothing gets zeros. scores: memory for `longest` values in each thread.
static void attend(const struct batch *batch, const float *queries, int64_t stride,
                   const struct cache *cache, const struct positions *seen, float *scores,
                   float *output)
{
    const int64_t d_k = batch->d_k, d_v = batch->d_v, heads = batch->heads;
    float *own_scores = scores + omp_get_thread_num() * seen->longest;
#pragma omp for schedule(static)
    for (int64_t unit = 0; unit < batch->rows * heads; unit++) {
        const int64_t row = unit / heads, head = unit % heads;
        const int64_t hypothesis = batch->hypotheses ? batch->hypotheses[row] : row;
        const int64_t sentence = hypothesis / batch->beams;
        const int64_t list = hypothesis / seen->hypotheses_per_list;
        const float *keys = cache->keys + sentence * cache->key_sentence + head * cache->key_head;
        const float *values =
            cache->values + sentence * cache->value_sentence + head * cache->value_head;
        attend_once(queries + row * stride + head * d_k, keys, values,
                    seen->places + list * seen->longest, seen->counts[list], d_k, d_v,
                    cache->scaling, own_scores, output + unit * d_v);
    }
}

// ---------------------------------------------------------------------------------------------
// The layers of a decoder, or of an encoder (section 3.1)
// ---------------------------------------------------------------------------------------------

struct layer {
    struct product past_qkv, past_output, source_query, source_output, fc1, fc2;
    struct norm past_norm, source_norm, final_norm;
    struct cache past, source; // without keys of a source, there is no attention to it
    int32_t norm_first;
};

// Scratch memory of a step with R rows.
struct memory {
    struct rounded rounded;
    float *normed;  // (R, D)
    float *inner;   // (R, largest number of outputs)
    float *heads;   // (R, H d_v)
    float *update;  // (R, D)
    float *scores;  // (threads, longest list)
};

// The states that a sub-layer reads.
static const float *before(const struct layer *layer, const struct norm *norm,
                           const struct batch *batch, const float *states, struct memory *memory)
{
    if (!layer->norm_first)
        return states;
    add_and_normalise(norm, states, NULL, batch->rows, batch->width, memory->normed);
    return memory->normed;
}

// LayerNorm(x + Sublayer(x)), or x + Sublayer(LayerNorm(x)) in a pre-norm layer.
static void after(const struct layer *layer, const struct norm *norm, const struct batch *batch,
                  float *states, struct memory *memory)
{
    if (layer->norm_first)
        add(states, memory->update, batch->rows * batch->width);
    else
        add_and_normalise(norm, states, memory->update, batch->rows, batch->width, states);
}

// Run the layers on states (R, D), in place, and store their keys and values.
//
// An encoder is a decoder without a source, whose hypotheses are the tokens of a sentence. All of
// them see each other, because all keys are stored before a token attends.
EXPORT void run_layers(const struct layer *layers, int count, const struct batch *batch,
                       float *states, struct memory *memory, int threads)
{
    const int64_t rows = batch->rows, queries = batch->heads * batch->d_k;
#pragma omp parallel num_threads(threads)
    for (const struct layer *layer = layers; layer < layers + count; layer++) {
        const float *inputs = before(layer, &layer->past_norm, batch, states, memory);
        multiply(&layer->past_qkv, inputs, rows, &memory->rounded, memory->inner);
        store(batch, memory->inner, &layer->past);
        attend(batch, memory->inner, layer->past_qkv.out, &layer->past, &batch->past,
               memory->scores, memory->heads);
        multiply(&layer->past_output, memory->heads, rows, &memory->rounded, memory->update);
        after(layer, &layer->past_norm, batch, states, memory);
        if (layer->source.keys) {
            inputs = before(layer, &layer->source_norm, batch, states, memory);
            multiply(&layer->source_query, inputs, rows, &memory->rounded, memory->inner);
            attend(batch, memory->inner, queries, &layer->source, &batch->source,
                   memory->scores, memory->heads);
            multiply(&layer->source_output, memory->heads, rows, &memory->rounded, memory->update);
            after(layer, &layer->source_norm, batch, states, memory);
        }
        inputs = before(layer, &layer->final_norm, batch, states, memory);
        multiply(&layer->fc1, inputs, rows, &memory->rounded, memory->inner);
        multiply(&layer->fc2, memory->inner, rows, &memory->rounded, memory->update);
        after(layer, &layer->final_norm, batch, states, memory);
    }
}

// ---------------------------------------------------------------------------------------------
// The best continuations of hypotheses
// ---------------------------------------------------------------------------------------------

INLINE float sum_of_exponentials(const float *values, int64_t count, float highest)
{
    float total = 0;
    for (int64_t i = 0; i < count; i++)
        total += exponential(values[i] - highest);
    return total;
}

// Compute the log-sum-exp of each row of logits (R, V), and the maximum of each block: (R, V / block).
EXPORT void log_sums_and_maxima(const float *logits, int64_t rows, int64_t vocabulary,
                                int64_t block, float *log_sums, float *maxima, int threads)
{
    const int64_t blocks = vocabulary / block;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t row = 0; row < rows; row++) {
        const float *values = logits + row * vocabulary;
        float so_far = -3e38f; // the highest logit of the blocks so far
        double total = 0;      // of e^(logit - so_far)
        for (int64_t i = 0; i <= blocks; i++) {
            const int64_t width = i < blocks ? block : vocabulary - blocks * block;
            const float highest = maximum(values + i * block, width);
            if (i < blocks)
                maxima[row * blocks + i] = highest;
            if (width == 0 || highest <= -3e38f)
                continue;
            if (highest > so_far) {
                total *= __builtin_exp((double)so_far - highest);
                so_far = highest;
            }
            total += __builtin_exp((double)highest - so_far) *
                     sum_of_exponentials(values + i * block, width, highest);
        }
        log_sums[row] = (float)(so_far + __builtin_log(total));
    }
}

// Find the first of the best tokens of each row of logits (R, V): (R,).
EXPORT void best_tokens(const float *logits, int64_t rows, int64_t vocabulary, int64_t *tokens,
                        int threads)
{
#pragma omp parallel for schedule(static) num_threads(threads) if (rows > 1)
    for (int64_t row = 0; row < rows; row++) {
        const float *values = logits + row * vocabulary;
        const float highest = maximum(values, vocabulary);
        tokens[row] = 0; // if all logits are -inf
        for (int64_t token = 0; token < vocabulary; token++)
            if (values[token] == highest) {
                tokens[row] = token;
                break;
            }
    }
}

// Insert a score into a list of the best, best first. Equal scores keep their order.
INLINE void insert(float score, int64_t hypothesis, int64_t token, int64_t count, float *scores,
                   int64_t *hypotheses, int64_t *tokens)
{
    int64_t place = count - 1;
    for (; place > 0 && scores[place - 1] < score; place--) {
        scores[place] = scores[place - 1];
        hypotheses[place] = hypotheses[place - 1];
        tokens[place] = tokens[place - 1];
    }
    scores[place] = score;
    hypotheses[place] = hypothesis;
    tokens[place] = token;
}

// Find the C best continuations of each sentence, best first: (B, C) each.
//
// log_sums: (R,) of the logits. maxima: (R, V / block). running: (B * K) log-probabilities of the
// hypotheses. places: (B * K) the row of logits of each hypothesis, or -1 if it has none; without
// places, every hypothesis has its own row. A list that cannot be filled ends with `nothing`, the
// least of all scores. The C best lie in the C blocks with the best maxima, or after the last whole
// block.
EXPORT void best_candidates(const float *logits, int64_t vocabulary, int64_t block,
                            const float *log_sums, const float *maxima, const float *running,
                            const int64_t *places, int64_t sentences, int64_t beams, int64_t count,
                            float nothing, float *scores, int64_t *hypotheses, int64_t *tokens,
                            int threads)
{
    const int64_t blocks = vocabulary / block;
#pragma omp parallel for schedule(static) num_threads(threads) if (sentences > 1)
    for (int64_t sentence = 0; sentence < sentences; sentence++) {
        float best_scores[count];
        int64_t best_of[count], best_blocks[count]; // hypotheses and blocks, by their maxima
        float *own = scores + sentence * count;
        int64_t *own_hypotheses = hypotheses + sentence * count, *own_tokens = tokens + sentence * count;
        for (int64_t i = 0; i < count; i++) {
            best_scores[i] = own[i] = nothing;
            best_of[i] = best_blocks[i] = -1;
            own_hypotheses[i] = own_tokens[i] = 0;
        }
        for (int64_t k = 0; k < beams; k++) {
            const int64_t hypothesis = sentence * beams + k;
            const int64_t row = places ? places[hypothesis] : hypothesis;
            if (row < 0)
                continue;
            const float offset = running[hypothesis] - log_sums[row];
            const float *values = logits + row * vocabulary;
            for (int64_t i = 0; i < blocks; i++) {
                const float score = maxima[row * blocks + i] + offset;
                if (score > best_scores[count - 1])
                    insert(score, k, i, count, best_scores, best_of, best_blocks);
            }
            for (int64_t token = blocks * block; token < vocabulary; token++) {
                const float score = values[token] + offset;
                if (score > own[count - 1])
                    insert(score, k, token, count, own, own_hypotheses, own_tokens);
            }
        }
        for (int64_t i = 0; i < count && best_of[i] >= 0; i++) {
            const int64_t hypothesis = sentence * beams + best_of[i];
            const int64_t row = places ? places[hypothesis] : hypothesis;
            const float offset = running[hypothesis] - log_sums[row];
            const int64_t first = best_blocks[i] * block;
            const float *values = logits + row * vocabulary + first;
            if (best_scores[i] <= own[count - 1])
                break;
            for (int64_t j = 0; j < block; j++) {
                const float score = values[j] + offset;
                if (score > own[count - 1])
                    insert(score, best_of[i], first + j, count, own, own_hypotheses, own_tokens);
            }
        }
    }
}
