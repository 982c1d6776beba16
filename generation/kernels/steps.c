// Steps of a search in one call, as long as its sentences stay in the batch (section 6.1).
//
// Shapes: B sentences, K hypotheses of each, R of them with states, C candidates of a sentence,
// D = d_model, N positions of the cache, T steps, V entries of the vocabulary.

#include "instructions.h"
#include "layers.h"
#include "search.h"

#include <math.h>

// A decoder that reads tokens, and its memory.
struct reader {
    const struct embedding *embedding;
    const float *encodings; // (T, D) of the positions of these steps
    const struct layer *layers;
    int64_t layers_count;
    const struct product *vocabulary;
    struct batch batch;
    struct memory *memory;
    struct rounded rounded;
    float *states, *logits;     // (B * K, D), (B * K, V)
    float *past, *next_past;    // (B, K, N), 0 where a hypothesis sees; NULL if all see all positions
    int64_t room;               // N
    int32_t *places, *counts;   // (B * K, N), (B * K,): the lists of positions
};

// The choice of hypotheses, and memory for the candidates.
struct choice {
    struct rules rules;
    const float *penalties;     // (T,)
    struct beam beam;
    struct chosen chosen;       // by the last step
    int32_t forgets;            // whether only the open rows of `chosen` are computed
    int64_t candidates, block;  // C, and the entries of the vocabulary that share a maximum
    int64_t *rows_of;           // (B * K,)
    float *log_sums, *maxima;   // (B * K,), (B * K, V / block)
    float *scores;              // (B, C)
    int64_t *parents, *tokens;  // (B, C)
};

// Clear the keys and values at the positions of a step, for hypotheses that have no states.
static void clear(const struct reader *reader, int64_t sentences)
{
    const struct batch *batch = &reader->batch;
    const int64_t count = batch->beams;
    for (int64_t i = 0; i < reader->layers_count; i++) {
        const struct cache *past = &reader->layers[i].past;
        for (int64_t unit = 0; unit < sentences * batch->heads; unit++) {
            const int64_t sentence = unit / batch->heads, head = unit % batch->heads;
            float *keys = past->keys + sentence * past->key_sentence + head * past->key_head;
            float *values = past->values + sentence * past->value_sentence + head * past->value_head;
            memset(keys + batch->used * batch->d_k, 0, (size_t)(count * batch->d_k) * sizeof(float));
            memset(values + batch->used * batch->d_v, 0, (size_t)(count * batch->d_v) * sizeof(float));
        }
    }
}

// List the positions that hypotheses see, after they have chosen their parents (B, K).
static void list_past(struct reader *reader, const int64_t *parents, int64_t sentences)
{
    struct batch *batch = &reader->batch;
    const int64_t end = batch->used + batch->beams;
    int64_t lists = 1;
    if (reader->past) {
        lists = sentences * batch->beams;
        descend(reader->past, parents, sentences, batch->beams, reader->room, batch->used,
                reader->next_past);
        float *before = reader->past;
        reader->past = reader->next_past;
        reader->next_past = before;
        list_positions(reader->past, lists, end, reader->room, reader->places, reader->counts);
    } else {
        for (int64_t i = 0; i < end; i++)
            reader->places[i] = (int32_t)i;
        reader->counts[0] = (int32_t)end;
    }
    batch->past = (struct positions){reader->places, reader->counts, end,
                                     sentences * batch->beams / lists};
}

// Read a token of each hypothesis (B, K), and predict the next: logits (R, V). Return 0 if a token is
// not in the vocabulary. Nothing has changed then.
static int read_tokens(struct reader *reader, const int64_t *tokens, const int64_t *parents,
                       int64_t sentences, int step, int threads)
{
    struct batch *batch = &reader->batch;
    if (!embed_tokens(reader->embedding, tokens, batch->hypotheses, batch->rows,
                      reader->encodings + step * batch->width, reader->states))
        return 0;
    list_past(reader, parents, sentences);
    if (batch->hypotheses)
        clear(reader, sentences);
    run_layers(reader->layers, (int)reader->layers_count, batch, reader->states, reader->memory,
               threads);
    multiply_states(reader->vocabulary, reader->states, batch->rows, &reader->rounded,
                    reader->logits, threads);
    batch->used += batch->beams;
    return 1;
}

// Sentences leave the batch as soon as an eighth of them is done.
INLINE int leave(int64_t done, int64_t sentences) { return done > 0 && 8 * done >= sentences; }

// Take up to `most` steps of a beam search, until sentences leave. `chosen` gets the last choice, and
// parents and tokens (T, B, K) get all choices. Return the number of steps.
//
// Stop before a token that is not in the vocabulary. Return -1 if a best score is NaN.
EXPORT int run_beam_steps(struct reader *reader, struct choice *choice, int most, int64_t *parents,
                          int64_t *tokens, int threads)
{
    struct batch *batch = &reader->batch;
    struct chosen *chosen = &choice->chosen;
    const int64_t sentences = choice->beam.sentences, all = sentences * batch->beams;
    const struct candidates best = {choice->scores, choice->parents, choice->tokens,
                                    choice->candidates};
    for (int step = 0; step < most; step++) {
        const int some = choice->forgets && 8 * chosen->rows <= 7 * all;
        batch->hypotheses = some ? chosen->open_rows : NULL;
        batch->rows = some ? chosen->rows : all;
        if (!read_tokens(reader, chosen->tokens, chosen->parents, sentences, step, threads))
            return step;
        best_candidates(reader->logits, batch->rows, reader->vocabulary->out, choice->block, NULL, 0,
                        chosen->running, batch->hypotheses, sentences, batch->beams, best.count,
                        -INFINITY, choice->rows_of, choice->log_sums, choice->maxima,
                        choice->scores, choice->parents, choice->tokens, threads);
        chosen->parents = parents + step * all;
        chosen->tokens = tokens + step * all;
        choice->rules.length++;
        choice->rules.penalty = choice->penalties[step];
        if (!advance_beam(&best, &choice->rules, &choice->beam, chosen))
            return -1;
        if (leave(chosen->done, sentences))
            return step + 1;
    }
    return most;
}

// Take up to `most` steps of a greedy search, until sentences leave. The first of tokens (T + 1, B) and
// of done (T + 1, B) are given, and those of each step follow. Return the number of steps.
//
// Stop before a token that is not in the vocabulary.
EXPORT int run_greedy_steps(struct reader *reader, const int64_t *limits, int64_t sentences,
                            int64_t length, const int64_t *ends, int64_t ends_count, int most,
                            int64_t *tokens, char *done, int threads)
{
    for (int step = 0; step < most; step++, tokens += sentences, done += sentences) {
        if (!read_tokens(reader, tokens, NULL, sentences, step, threads))
            return step;
        best_tokens(reader->logits, sentences, reader->vocabulary->out, tokens + sentences, threads);
        const int count = end_sentences(tokens + sentences, limits, sentences, length + step + 1, ends,
                                        ends_count, done, done + sentences);
        if (leave(count, sentences))
            return step + 1;
    }
    return most;
}
