// The layers of a decoder, or of an encoder (section 3.1), their caches and their memory.
//
// Shapes: R rows of states (hypotheses, or tokens of an encoder), B sentences, K hypotheses of each,
// D = d_model, H heads, N positions of a cache.

#pragma once
#include "products.h"

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
    int32_t encodes; // rows are tokens of an encoder, and those of a sentence share a list
};

struct norm {
    const float *weight, *bias; // (D,)
    float epsilon;
};

struct layer {
    struct product past_qkv, past_output, source_query, source_kv, source_output, fc1, fc2;
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
    float *scores;  // (threads, longest list, LANES)
};

// Run layers on states (R, D), in place, and store their keys and values.
void run_layers(const struct layer *layers, int count, const struct batch *batch, float *states,
                struct memory *memory, int threads);
