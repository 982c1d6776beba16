// What the steps of a search compute beside the layers of the decoder (section 6.1).
//
// Shapes: R rows of states, B sentences, K hypotheses of each, C candidates of a sentence, D = d_model,
// N positions of a cache, V entries of the vocabulary.

#pragma once
#include <stdint.h>

struct embedding {
    int64_t entries, width; // of the vocabulary, and D
    const void *table;      // (entries, D) float, or int8 with scales
    const float *scales;    // (entries,) or NULL
    float factor;           // sqrt(D) (3.4)
};

// Continuations of hypotheses: (B, C) each, best first.
struct candidates {
    const float *scores;
    const int64_t *parents, *tokens;
    int64_t count; // C
};

struct rules {
    const int64_t *ends;     // (ends_count,) tokens that end a sentence
    int64_t ends_count;
    int64_t length;          // tokens of the hypotheses after this step
    float penalty;           // of this length
    int32_t to_beat;         // the place of the finished hypothesis that open ones must beat
    int32_t stops_when_full; // stop at K finished hypotheses
    float ruled_out;         // is added to the score of a candidate that ends
};

struct ending {
    int64_t length, parent, token;
};

struct beam {
    int64_t sentences, hypotheses; // B, K
    const int64_t *limits;         // (B,)
    const float *penalties;        // (B,) at the limits, or NULL for `penalty`
    float *finished;               // (B, K) penalised scores, best first
    struct ending *endings;        // (B, K)
    char *done;                    // (B,)
};

struct chosen {
    float *running;            // (B, K) best first
    int64_t *parents, *tokens; // (B, K)
    int64_t *open_rows;        // (R,) those that can still win, among B * K
    int64_t rows, done;        // R, and the number of sentences that are done
};

int embed_tokens(const struct embedding *by, const int64_t *tokens, const int64_t *hypotheses,
                 int64_t rows, const float *position, float *states);

void descend(const float *before, const int64_t *parents, int64_t sentences, int64_t beams,
             int64_t positions, int64_t used, float *after);

void list_positions(const float *mask, int64_t lists, int64_t positions, int64_t stride,
                    int32_t *places, int32_t *counts);

void best_candidates(float *logits, int64_t rows, int64_t vocabulary, int64_t block,
                     const int64_t *banned, int64_t banned_count, const float *running,
                     const int64_t *open_rows, int64_t sentences, int64_t beams, int64_t count,
                     float nothing, int64_t *places, float *log_sums, float *maxima, float *scores,
                     int64_t *hypotheses, int64_t *tokens, int threads);

void best_tokens(const float *logits, int64_t rows, int64_t vocabulary, int64_t *tokens, int threads);

int end_sentences(const int64_t *tokens, const int64_t *limits, int64_t sentences, int64_t length,
                  const int64_t *ends, int64_t ends_count, const char *done_before, char *done);

int advance_beam(const struct candidates *candidates, const struct rules *rules,
                 const struct beam *beam, struct chosen *chosen);
