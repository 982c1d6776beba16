// Attention inside the sentences of a packed batch, and its gradient, for training (section 3.2.1).
//
// Shapes: N tokens of one side, H heads, Q queries and K keys of a sentence. Rows in memory for one
// head of a sentence are padded to whole vectors, so the products need no code for remainders.

#include "random.h"

#include <omp.h>

enum { ROWS = 8 }; // rows of a product at once; more rows would exceed the registers of AVX2

struct sides {
    const int32_t *query_starts, *key_starts; // (sentences + 1,)
    int64_t sentences, heads, d_k, d_v;
    float scaling; // 1 / sqrt(d_k)
    int32_t is_causal, is_half; // the tensors are bfloat16, or else floats
    struct dropout dropout;
};

INLINE int64_t padded(int64_t count)
{
    return (count + LANES - 1) / LANES * LANES;
}

// output (rows, width) = left (rows, depth) * right (depth, width). Strides of `left` are given.
// Rows are computed by eights, and `width` is a multiple of LANES.
INLINE void multiply_floats(const float *left, int64_t row_stride, int64_t column_stride, int64_t rows,
                            int64_t depth, const float *right, int64_t width, float *output)
{
    for (int64_t row = 0; row < rows; row += ROWS)
        for (int64_t first = 0; first < width; first += LANES) {
            floats sums[ROWS];
            const float *factors = left + row * row_stride;
#pragma GCC unroll 8
            for (int i = 0; i < ROWS; i++)
                sums[i] = float_in_all_lanes(0);
            for (int64_t k = 0; k < depth; k++) {
                const floats lanes = read_floats(right + k * width + first);
#pragma GCC unroll 8
                for (int i = 0; i < ROWS; i++)
                    sums[i] = multiply_add(
                        float_in_all_lanes(factors[i * row_stride + k * column_stride]), lanes,
                        sums[i]);
            }
#pragma GCC unroll 8
            for (int i = 0; i < ROWS; i++)
                memcpy(output + (row + i) * width + first, &sums[i], sizeof(floats));
        }
}

// Read rows of one head: (count, d), `stride` apart, to floats (padded(count), padded(d)).
static void load(const void *values, int64_t count, int64_t stride, int64_t d, int is_half,
                 float *rows)
{
    const int64_t width = padded(d);
    for (int64_t i = 0; i < count; i++) {
        float *row = rows + i * width;
        if (is_half)
            widen_row((const uint16_t *)values + i * stride, d, row);
        else
            memcpy(row, (const float *)values + i * stride, (size_t)d * sizeof(float));
        memset(row + d, 0, (size_t)(width - d) * sizeof(float));
    }
    memset(rows + count * width, 0, (size_t)((padded(count) - count) * width) * sizeof(float));
}

// Write rows of one head: the inverse of `load`.
static void store_rows(const float *rows, int64_t count, int64_t stride, int64_t d, int is_half,
                       void *values)
{
    for (int64_t i = 0; i < count; i++) {
        const float *row = rows + i * padded(d);
        if (is_half)
            halve_row(row, d, (uint16_t *)values + i * stride);
        else
            memcpy((float *)values + i * stride, row, (size_t)d * sizeof(float));
    }
}

// Transpose rows (padded(count), padded(d)) to columns (d, padded(count)).
static void transpose_rows(const float *rows, int64_t count, int64_t d, float *columns)
{
    const int64_t width = padded(count);
    for (int64_t j = 0; j < d; j++)
        for (int64_t i = 0; i < width; i++)
            columns[j * width + i] = rows[i * padded(d) + j];
}

// Fill `lows` with `width` zeros, then as many LOWEST, and return the place of the first LOWEST.
//
// A mask that starts `count` floats before that place hides all keys but the first `count`.
INLINE float *mask_of(float *lows, int64_t width)
{
    for (int64_t i = 0; i < width; i++) {
        lows[i] = 0;
        lows[width + i] = LOWEST;
    }
    return lows + width;
}

// Compute the exponentials of scores (count,) of at most 0. Very low scores give 0.
INLINE void exponentials(float *values, int64_t count)
{
    for (int64_t first = 0; first < count; first += LANES)
        for (int64_t i = first; i < first + LANES; i++)
            values[i] = values[i] < NEGLIGIBLE ? 0 : exponential(values[i]);
}

// Replace products of queries with keys (Q, width) by their softmax over the keys that each sees.
static void softmax(const struct sides *sides, float *weights, int64_t Q, int64_t K, int64_t width,
                    const float *hidden, float *log_sums)
{
    const float scaling = sides->scaling;
    for (int64_t i = 0; i < Q; i++) {
        float *row = weights + i * width;
        const float *low = hidden - (sides->is_causal ? i + 1 : K);
        for (int64_t first = 0; first < width; first += LANES)
            for (int64_t j = first; j < first + LANES; j++)
                row[j] = row[j] * scaling + low[j];
        floats lanes = float_in_all_lanes(LOWEST);
        for (int64_t first = 0; first < width; first += LANES)
            lanes = larger(read_floats(row + first), lanes); // overlooks NaN
        const float highest = largest_lane(lanes);
        for (int64_t first = 0; first < width; first += LANES)
            for (int64_t j = first; j < first + LANES; j++)
                row[j] -= highest;
        log_sums[i * sides->heads] = highest;
    }
    exponentials(weights, Q * width);
    for (int64_t i = 0; i < Q; i++) {
        float *row = weights + i * width, *log_sum = log_sums + i * sides->heads;
        floats lanes = float_in_all_lanes(0);
        for (int64_t first = 0; first < width; first += LANES)
            lanes += read_floats(row + first);
        // Scores that are all -inf have no softmax, as in torch.
        const float total = *log_sum > LOWEST ? sum_of_lanes(lanes) : __builtin_nanf("");
        const float share = 1 / total;
        for (int64_t first = 0; first < width; first += LANES)
            for (int64_t j = first; j < first + LANES; j++)
                row[j] *= share;
        *log_sum += __builtin_logf(total);
    }
}

// Replace products of queries with keys (Q, width) by the softmax that had these `log_sums`.
static void softmax_again(const struct sides *sides, float *weights, int64_t Q, int64_t K,
                          int64_t width, const float *hidden, const float *log_sums)
{
    const float scaling = sides->scaling;
    for (int64_t i = 0; i < Q; i++) {
        float *row = weights + i * width;
        const float *low = hidden - (sides->is_causal ? i + 1 : K);
        const float log_sum = log_sums[i * sides->heads];
        for (int64_t first = 0; first < width; first += LANES)
            for (int64_t j = first; j < first + LANES; j++)
                row[j] = row[j] * scaling + low[j] - log_sum;
    }
    exponentials(weights, Q * width);
}

// Place of one head of a sentence in a tensor (N, H, d).
INLINE void *place(const void *values, int64_t token, int64_t head, int64_t d,
                   const struct sides *sides)
{
    return (char *)values + (token * sides->heads + head) * d * (sides->is_half ? 2 : 4);
}

// One head of a sentence: its first query and key, their numbers, and the padded number of keys.
struct unit {
    int64_t head, query, key, Q, K, width;
};

INLINE struct unit unit_of(const struct sides *sides, int64_t number)
{
    const int64_t sentence = number / sides->heads;
    const int64_t query = sides->query_starts[sentence], key = sides->key_starts[sentence];
    const int64_t K = sides->key_starts[sentence + 1] - key;
    return (struct unit){number % sides->heads, query, key,
                         sides->query_starts[sentence + 1] - query, K, padded(K)};
}

// Read the queries, keys and values of a head of a sentence.
INLINE void load_states(const struct sides *sides, const struct unit *unit, const void *queries,
                        const void *keys, const void *values, float *q, float *k, float *v)
{
    const int64_t d_k = sides->d_k, d_v = sides->d_v, heads = sides->heads, head = unit->head;
    const int is_half = sides->is_half;
    load(place(queries, unit->query, head, d_k, sides), unit->Q, heads * d_k, d_k, is_half, q);
    load(place(keys, unit->key, head, d_k, sides), unit->K, heads * d_k, d_k, is_half, k);
    load(place(values, unit->key, head, d_v, sides), unit->K, heads * d_v, d_v, is_half, v);
}

// Compute the output (N, H, d_v), and the logarithms of the sums of the softmax (N, H).
//
// room: (threads, `floats_of_room`), as many floats as `_room_of_thread` counts in
// training_kernels_vaswani.py.
EXPORT void attend_packed(const struct sides *sides, const void *queries, const void *keys,
                          const void *values, void *output, float *log_sums, float *room,
                          int64_t floats_of_room, int threads)
{
    const int64_t d_k = sides->d_k, d_v = sides->d_v, heads = sides->heads;
#pragma omp parallel for schedule(dynamic, 8) num_threads(threads)
    for (int64_t number = 0; number < sides->sentences * heads; number++) {
        const struct unit unit = unit_of(sides, number);
        const int64_t query = unit.query, Q = unit.Q, K = unit.K, width = unit.width;
        const int64_t head = unit.head;
        float *q = room + omp_get_thread_num() * floats_of_room;
        float *k = q + padded(Q) * padded(d_k), *k_columns = k + width * padded(d_k);
        float *v = k_columns + width * padded(d_k), *weights = v + width * padded(d_v);
        float *o = weights + padded(Q) * width, *lows = o + padded(Q) * padded(d_v);
        load_states(sides, &unit, queries, keys, values, q, k, v);
        transpose_rows(k, K, d_k, k_columns);
        multiply_floats(q, padded(d_k), 1, Q, d_k, k_columns, width, weights);
        softmax(sides, weights, Q, K, width, mask_of(lows, width), log_sums + query * heads + head);
        for (int64_t i = 0; i < Q; i++)
            drop_out(&sides->dropout, (query + i) * heads + head, weights + i * width, width);
        multiply_floats(weights, width, 1, Q, K, v, padded(d_v), o);
        store_rows(o, Q, heads * d_v, d_v, sides->is_half, place(output, query, head, d_v, sides));
    }
}

// Compute the gradients of queries, keys and values, from that of the output (N, H, d_v).
EXPORT void attend_packed_backward(const struct sides *sides, const void *queries, const void *keys,
                                   const void *values, const void *gradient, const float *log_sums,
                                   void *of_queries, void *of_keys, void *of_values, float *room,
                                   int64_t floats_of_room, int threads)
{
    const int64_t d_k = sides->d_k, d_v = sides->d_v, heads = sides->heads;
#pragma omp parallel for schedule(dynamic, 8) num_threads(threads)
    for (int64_t number = 0; number < sides->sentences * heads; number++) {
        const struct unit unit = unit_of(sides, number);
        const int64_t query = unit.query, Q = unit.Q, K = unit.K, width = unit.width;
        const int64_t head = unit.head;
        float *q = room + omp_get_thread_num() * floats_of_room;
        float *k = q + padded(Q) * padded(d_k), *columns = k + width * padded(d_k);
        const int64_t widest = padded(d_k) > padded(d_v) ? padded(d_k) : padded(d_v);
        float *v = columns + width * widest, *weights = v + width * padded(d_v);
        float *slopes = weights + padded(Q) * width, *o = slopes + padded(Q) * width;
        float *lows = o + padded(Q) * padded(d_v), *result = lows + 2 * width;
        load_states(sides, &unit, queries, keys, values, q, k, v);
        load(place(gradient, query, head, d_v, sides), Q, heads * d_v, d_v, sides->is_half, o);
        transpose_rows(k, K, d_k, columns);
        multiply_floats(q, padded(d_k), 1, Q, d_k, columns, width, weights);
        transpose_rows(v, K, d_v, columns);
        multiply_floats(o, padded(d_v), 1, Q, d_v, columns, width, slopes); // of the weights
        softmax_again(sides, weights, Q, K, width, mask_of(lows, width),
                      log_sums + query * heads + head);
        for (int64_t i = 0; i < Q; i++) {
            float *row = weights + i * width, *slope = slopes + i * width;
            floats lanes = float_in_all_lanes(0);
            drop_out(&sides->dropout, (query + i) * heads + head, slope, width);
            for (int64_t first = 0; first < width; first += LANES)
                lanes = multiply_add(read_floats(row + first), read_floats(slope + first), lanes);
            const float mean = sum_of_lanes(lanes);
            for (int64_t first = 0; first < width; first += LANES)
                for (int64_t j = first; j < first + LANES; j++)
                    slope[j] = row[j] * (slope[j] - mean) * sides->scaling; // of the scores
            drop_out(&sides->dropout, (query + i) * heads + head, row, width);
        }
        multiply_floats(slopes, width, 1, Q, K, k, padded(d_k), result);
        store_rows(result, Q, heads * d_k, d_k, sides->is_half,
                   place(of_queries, query, head, d_k, sides));
        multiply_floats(slopes, 1, width, K, Q, q, padded(d_k), result);
        store_rows(result, K, heads * d_k, d_k, sides->is_half,
                   place(of_keys, unit.key, head, d_k, sides));
        multiply_floats(weights, 1, width, K, Q, o, padded(d_v), result);
        store_rows(result, K, heads * d_v, d_v, sides->is_half,
                   place(of_values, unit.key, head, d_v, sides));
    }
}
