// Ends of sentences, and the choice of hypotheses, in a step of a search (section 6.1).
//
// Shapes: B sentences, K hypotheses of each, C candidates of a sentence.

#include "instructions.h"
#include "search.h"

#include <math.h>

// Find the place of a score in a list (K,), best first, and make room for it. Equal scores keep their
// order. Without a place, the result is K.
INLINE int64_t make_room(float score, float *scores, void *list, size_t size, int64_t count)
{
    if (!(score > scores[count - 1]))
        return count;
    int64_t place = count - 1;
    while (place > 0 && scores[place - 1] < score)
        place--;
    char *first = (char *)list + (size_t)place * size;
    const size_t moved = (size_t)(count - 1 - place);
    memmove(scores + place + 1, scores + place, moved * sizeof(float));
    memmove(first + size, first, moved * size);
    scores[place] = score;
    return place;
}

INLINE int is_end(int64_t token, const int64_t *ends, int64_t ends_count)
{
    int found = 0;
    for (int64_t i = 0; i < ends_count; i++)
        found |= token == ends[i];
    return found;
}

// Mark sentences (B,) that end with these tokens, number `length` of each. Return how many are done.
EXPORT int end_sentences(const int64_t *tokens, const int64_t *limits, int64_t sentences,
                         int64_t length, const int64_t *ends, int64_t ends_count,
                         const char *done_before, char *done)
{
    int count = 0;
    for (int64_t i = 0; i < sentences; i++) {
        done[i] = done_before[i] || length >= limits[i] || is_end(tokens[i], ends, ends_count);
        count += done[i];
    }
    return count;
}

// Choose the K best candidates of a sentence that go on, and keep its K best finished hypotheses.
//
// A finished hypothesis must be among the best K candidates of its step, as in transformers.
static void choose(const struct candidates *candidates, const struct rules *rules,
                   const struct beam *beam, int64_t sentence, struct chosen *chosen)
{
    const int64_t beams = beam->hypotheses, own = sentence * beams;
    const int64_t first = sentence * candidates->count;
    const float *scores = candidates->scores + first;
    const int64_t *parents = candidates->parents + first, *tokens = candidates->tokens + first;
    float *running = chosen->running + own;
    struct ending *endings = beam->endings + own;
    const int at_limit = rules->length >= beam->limits[sentence];
    int64_t going_on[beams]; // numbers of candidates
    for (int64_t k = 0; k < beams; k++) {
        running[k] = -INFINITY;
        going_on[k] = k;
    }
    for (int64_t i = 0; i < candidates->count; i++) {
        const int ends = at_limit || is_end(tokens[i], rules->ends, rules->ends_count);
        int64_t place = make_room(ends ? scores[i] + rules->ruled_out : scores[i], running,
                                  going_on, sizeof(*going_on), beams);
        if (place < beams)
            going_on[place] = i;
        if (!ends || i >= beams || beam->done[sentence] || scores[i] <= rules->ruled_out / 2)
            continue;
        place = make_room(scores[i] / rules->penalty, beam->finished + own, endings,
                          sizeof(*endings), beams);
        if (place < beams)
            endings[place] = (struct ending){rules->length, parents[i], tokens[i]};
    }
    for (int64_t k = 0; k < beams; k++) {
        chosen->parents[own + k] = parents[going_on[k]];
        chosen->tokens[own + k] = tokens[going_on[k]];
    }
}

// Choose the hypotheses that go on, keep the best finished ones, and mark sentences that are done.
// Return 0 if a best score is NaN. NaN is better than any number.
EXPORT int advance_beam(const struct candidates *candidates, const struct rules *rules,
                        const struct beam *beam, struct chosen *chosen)
{
    const int64_t beams = beam->hypotheses;
    for (int64_t sentence = 0; sentence < beam->sentences; sentence++)
        if (__builtin_isnan(candidates->scores[sentence * candidates->count]))
            return 0;
    chosen->rows = chosen->done = 0;
    for (int64_t sentence = 0; sentence < beam->sentences; sentence++) {
        choose(candidates, rules, beam, sentence, chosen);
        const float *running = chosen->running + sentence * beams;
        const float to_beat = beam->finished[sentence * beams + rules->to_beat];
        const float penalty = beam->penalties ? beam->penalties[sentence] : rules->penalty;
        int is_full = 1;
        for (int64_t k = 0; k < beams; k++)
            is_full &= beam->endings[sentence * beams + k].length > 0;
        if (!(running[0] / penalty > to_beat) || rules->length >= beam->limits[sentence] ||
            (rules->stops_when_full && is_full))
            beam->done[sentence] = 1;
        chosen->done += beam->done[sentence];
        for (int64_t k = 0; k < beams && !beam->done[sentence]; k++)
            if (running[k] / penalty > to_beat)
                chosen->open_rows[chosen->rows++] = sentence * beams + k;
    }
    return 1;
}
