// The layers of a decoder, or of an encoder (section 3.1).
//
// Functions without EXPORT run in all threads of a parallel region, and divide their loops.
//
// Shapes: R rows of states (hypotheses), B sentences, K hypotheses of each, D = d_model, H heads,
// N positions of a cache.

#include "instructions.h"
#include "products.h"

#include <omp.h>

// LayerNorm (section 3.1)

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

// Attention (section 3.2.1, equation 1)

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

// Layers

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
