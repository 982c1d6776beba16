// The layers of a decoder, or of an encoder (section 3.1).
//
// Functions without EXPORT run in all threads of a parallel region, and divide their loops.
//
// Shapes: R rows of states (hypotheses), B sentences, K hypotheses of each, D = d_model, H heads,
// N positions of a cache.

#include "attention.h"
#include "instructions.h"
#include "layers.h"

// Add an update (R, D), if there is one, to states, and normalise each row: output (R, D).
static void normalize_sum(const struct norm *by, const float *states, const float *update,
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

// The states that a sub-layer reads.
static const float *sublayer_input(const struct layer *layer, const struct norm *norm,
                                   const struct batch *batch, const float *states,
                                   struct memory *memory)
{
    if (!layer->norm_first)
        return states;
    normalize_sum(norm, states, NULL, batch->rows, batch->width, memory->normed);
    return memory->normed;
}

// LayerNorm(x + Sublayer(x)), or x + Sublayer(LayerNorm(x)) in a pre-norm layer.
static void add_update(const struct layer *layer, const struct norm *norm,
                       const struct batch *batch, float *states, struct memory *memory)
{
    if (layer->norm_first)
        add(states, memory->update, batch->rows * batch->width);
    else
        normalize_sum(norm, states, memory->update, batch->rows, batch->width, states);
}

// Store the keys and values of a source for all layers, and zeros at padding.
//
// The hypotheses of the batch are the tokens of sentences. Padding has no row.
//
// states: the encoder's output (R, D).
// tokens: the number of tokens, padding included.
EXPORT void read_source(const struct layer *layers, int count, const struct batch *batch,
                        int64_t tokens, const float *states, struct memory *memory, int threads)
{
#pragma omp parallel num_threads(threads)
    for (const struct layer *layer = layers; layer < layers + count; layer++) {
        multiply(&layer->source_kv, states, batch->rows, &memory->rounded, memory->inner);
        store(batch, memory->inner, layer->source_kv.out, &layer->source);
        store_zeros(batch, tokens, &layer->source);
    }
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
        const float *inputs = sublayer_input(layer, &layer->past_norm, batch, states, memory);
        multiply(&layer->past_qkv, inputs, rows, &memory->rounded, memory->inner);
        store(batch, memory->inner + queries, layer->past_qkv.out, &layer->past);
        attend(batch, memory->inner, layer->past_qkv.out, &layer->past, &batch->past,
               memory->scores, memory->heads);
        multiply(&layer->past_output, memory->heads, rows, &memory->rounded, memory->update);
        add_update(layer, &layer->past_norm, batch, states, memory);
        if (layer->source.keys) {
            inputs = sublayer_input(layer, &layer->source_norm, batch, states, memory);
            multiply(&layer->source_query, inputs, rows, &memory->rounded, memory->inner);
            attend(batch, memory->inner, queries, &layer->source, &batch->source,
                   memory->scores, memory->heads);
            multiply(&layer->source_output, memory->heads, rows, &memory->rounded, memory->update);
            add_update(layer, &layer->source_norm, batch, states, memory);
        }
        inputs = sublayer_input(layer, &layer->final_norm, batch, states, memory);
        multiply(&layer->fc1, inputs, rows, &memory->rounded, memory->inner);
        multiply(&layer->fc2, memory->inner, rows, &memory->rounded, memory->update);
        add_update(layer, &layer->final_norm, batch, states, memory);
    }
}
