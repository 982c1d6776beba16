// Attention (section 3.2.1, equation 1).
//
// Shapes: R rows of states (hypotheses, or tokens of an encoder), B sentences, K hypotheses of each,
// H heads, N positions of a cache.

#pragma once
#include "instructions.h"
#include "layers.h"

#include <omp.h>

INLINE float scalar_product(const float *left, const float *right, int64_t count)
{
    floats even = float_in_all_lanes(0), odd = even;
    int64_t i = 0;
    for (; i + 2 * LANES <= count; i += 2 * LANES) {
        even = multiply_add(read_floats(left + i), read_floats(right + i), even);
        odd = multiply_add(read_floats(left + i + LANES), read_floats(right + i + LANES), odd);
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
        floats sums[AT_ONCE];
#pragma GCC unroll 4
        for (int part = 0; part < AT_ONCE; part++)
            sums[part] = float_in_all_lanes(0);
        for (int32_t i = 0; i < count; i++) {
            const float *value = values + places[i] * width + first;
            const floats weight = float_in_all_lanes(weights[i]);
#pragma GCC unroll 4
            for (int part = 0; part < AT_ONCE; part++)
                sums[part] = multiply_add(weight, read_floats(value + part * LANES), sums[part]);
        }
#pragma GCC unroll 4
        for (int part = 0; part < AT_ONCE; part++)
            memcpy(output + first + part * LANES, &sums[part], sizeof(floats));
    }
    for (; first < width; first++) {
        float sum = 0;
        for (int32_t i = 0; i < count; i++)
            sum += weights[i] * values[places[i] * width + first];
        output[first] = sum;
    }
}

// One head of one hypothesis: softmax(q K^T / sqrt(d_k)) V over the listed positions.
//
// Scores that are all -inf have no softmax. The output is then NaN, as in torch.
INLINE void attend_once(const float *query, const float *keys, const float *values,
                        const int32_t *places, int32_t count, int64_t d_k, int64_t d_v,
                        float scaling, float *scores, float *output)
{
    for (int32_t i = 0; i < count; i++)
        scores[i] = scalar_product(query, keys + places[i] * d_k, d_k) * scaling;
    const float highest = maximum(scores, count);
    float total = highest > LOWEST ? 0 : __builtin_nanf("");
    for (int32_t i = 0; i < count; i++)
        scores[i] = exponential(scores[i] - highest);
    for (int32_t i = 0; i < count; i++)
        total += scores[i];
    for (int32_t i = 0; i < count; i++)
        scores[i] /= total;
    weighted_sum(scores, values, places, count, d_v, output);
}

// One head of up to LANES tokens that see the same positions, with a token in each lane.
//
// Each key and each value is read once for all of them. scores: memory for (count, LANES) floats.
INLINE void attend_together(const float *queries, int64_t tokens, int64_t stride, const float *keys,
                            const float *values, const int32_t *places, int32_t count, int64_t d_k,
                            int64_t d_v, float scaling, floats *scores, float *output,
                            int64_t output_stride)
{
    enum { AT_ONCE = 8 };
    const floats lowest = float_in_all_lanes(LOWEST);
    floats query[d_k], highest = lowest;
    for (int64_t i = 0; i < d_k; i++) {
        float lanes[LANES] = {0};
        for (int64_t lane = 0; lane < tokens; lane++)
            lanes[lane] = queries[lane * stride + i];
        memcpy(query + i, lanes, sizeof(lanes));
    }
    for (int32_t first = 0; first < count; first += AT_ONCE) {
        floats sums[AT_ONCE];
        const float *key[AT_ONCE];
        for (int i = 0; i < AT_ONCE; i++) { // the last ones may repeat a position
            key[i] = keys + places[first + i < count ? first + i : count - 1] * d_k;
            sums[i] = float_in_all_lanes(0);
        }
        for (int64_t j = 0; j < d_k; j++)
#pragma GCC unroll 8
            for (int i = 0; i < AT_ONCE; i++)
                sums[i] = multiply_add(query[j], float_in_all_lanes(key[i][j]), sums[i]);
        for (int i = 0; i < AT_ONCE && first + i < count; i++) {
            scores[first + i] = sums[i] * scaling;
            highest = larger(scores[first + i], highest);
        }
    }
    floats total = (floats)(highest <= lowest); // 0, or all bits of a lane, which are NaN
    for (int32_t i = 0; i < count; i++) {
        float lanes[LANES];
        const floats score = scores[i] - highest;
        memcpy(lanes, &score, sizeof(lanes));
        for (int lane = 0; lane < LANES; lane++)
            lanes[lane] = exponential(lanes[lane]);
        memcpy(scores + i, lanes, sizeof(lanes));
        total += scores[i];
    }
    for (int64_t first = 0; first < d_v; first += AT_ONCE) {
        const int64_t width = d_v - first < AT_ONCE ? d_v - first : AT_ONCE;
        floats sums[AT_ONCE];
        for (int j = 0; j < AT_ONCE; j++)
            sums[j] = float_in_all_lanes(0);
        for (int32_t i = 0; i < count; i++) {
            const float *value = values + places[i] * d_v + first;
            if (width == AT_ONCE)
#pragma GCC unroll 8
                for (int j = 0; j < AT_ONCE; j++)
                    sums[j] = multiply_add(scores[i], float_in_all_lanes(value[j]), sums[j]);
            else
                for (int j = 0; j < width; j++)
                    sums[j] = multiply_add(scores[i], float_in_all_lanes(value[j]), sums[j]);
        }
        for (int j = 0; j < width; j++) {
            float lanes[LANES];
            const floats mean = sums[j] / total;
            memcpy(lanes, &mean, sizeof(lanes));
            for (int64_t lane = 0; lane < tokens; lane++)
                output[lane * output_stride + first + j] = lanes[lane];
        }
    }
}

INLINE int64_t number_of(const struct batch *batch, int64_t row)
{
    return batch->hypotheses ? batch->hypotheses[row] : row;
}

// Up to LANES tokens of a sentence are a block. Returns the number of its first token.
INLINE int64_t block_of(const struct batch *batch, int64_t row)
{
    const int64_t number = number_of(batch, row);
    return number - number % batch->beams % LANES;
}

INLINE int begins_block(const struct batch *batch, int64_t row)
{
    return row == 0 || block_of(batch, row - 1) != block_of(batch, row);
}

// The number of rows of the block that begins at `row`. Padding has no rows.
INLINE int64_t tokens_of_block(const struct batch *batch, int64_t row)
{
    int64_t end = row + 1;
    while (end < batch->rows && block_of(batch, end) == block_of(batch, row))
        end++;
    return end - row;
}

// Store new keys and values at position `used` + the hypothesis' number in its sentence.
//
// rows: the keys (H d_k,) and then the values (H d_v,) of each row, `stride` apart.
static void store(const struct batch *batch, const float *rows, int64_t stride,
                  const struct cache *cache)
{
    const int64_t d_k = batch->d_k, d_v = batch->d_v, heads = batch->heads;
#pragma omp for schedule(static)
    for (int64_t row = 0; row < batch->rows; row++) {
        const int64_t hypothesis = number_of(batch, row);
        const int64_t sentence = hypothesis / batch->beams;
        const int64_t place = batch->used + hypothesis % batch->beams;
        const float *new_keys = rows + row * stride, *new_values = new_keys + heads * d_k;
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

// Store zeros for the hypotheses of a batch that have no row.
//
// hypotheses: the number of all hypotheses in the batch.
static void store_zeros(const struct batch *batch, int64_t hypotheses, const struct cache *cache)
{
    const int64_t d_k = batch->d_k, d_v = batch->d_v;
#pragma omp for schedule(static)
    for (int64_t row = 0; row <= batch->rows; row++) {
        int64_t hypothesis = row ? number_of(batch, row - 1) + 1 : 0;
        const int64_t end = row < batch->rows ? number_of(batch, row) : hypotheses;
        for (; hypothesis < end; hypothesis++) {
            const int64_t sentence = hypothesis / batch->beams;
            const int64_t place = batch->used + hypothesis % batch->beams;
            float *keys = cache->keys + sentence * cache->key_sentence + place * d_k;
            float *values = cache->values + sentence * cache->value_sentence + place * d_v;
            for (int64_t head = 0; head < batch->heads; head++) {
                memset(keys + head * cache->key_head, 0, (size_t)d_k * sizeof(float));
                memset(values + head * cache->value_head, 0, (size_t)d_v * sizeof(float));
            }
        }
    }
}

// Attend from queries (R, H d_k), `stride` apart, to a cache: output (R, H d_v).
//
// A hypothesis that sees nothing gets zeros. scores: memory for (`longest`, LANES) floats in each
// thread.
static void attend(const struct batch *batch, const float *queries, int64_t stride,
                   const struct cache *cache, const struct positions *seen, float *scores,
                   float *output)
{
    const int64_t d_k = batch->d_k, d_v = batch->d_v, heads = batch->heads;
    float *own_scores = scores + omp_get_thread_num() * seen->longest * LANES;
#pragma omp for schedule(static)
    for (int64_t unit = 0; unit < batch->rows * heads; unit++) {
        const int64_t row = unit / heads, head = unit % heads;
        const int64_t hypothesis = number_of(batch, row);
        const int64_t sentence = hypothesis / batch->beams;
        const int64_t list = hypothesis / seen->hypotheses_per_list;
        const float *query = queries + row * stride + head * d_k;
        const float *keys = cache->keys + sentence * cache->key_sentence + head * cache->key_head;
        const float *values =
            cache->values + sentence * cache->value_sentence + head * cache->value_head;
        const int32_t *places = seen->places + list * seen->longest, count = seen->counts[list];
        if (!batch->encodes)
            attend_once(query, keys, values, places, count, d_k, d_v, cache->scaling, own_scores,
                        output + unit * d_v);
        else if (begins_block(batch, row))
            attend_together(query, tokens_of_block(batch, row), stride, keys, values, places, count,
                            d_k, d_v, cache->scaling, (floats *)own_scores, output + unit * d_v,
                            heads * d_v);
    }
}
