// Embeddings of tokens, and the past of each hypothesis: the inputs of a step of decoding.
//
// Shapes: R rows of states, B sentences, K hypotheses of each, D = d_model, N positions of a cache.

#include "instructions.h"
#include "search.h"

// Embed the tokens (B * K,) of some hypotheses (R,), or of all, at one position: states (R, D).
//
// The states are those of torch, to the last bit. Return 0 if a token is not in the vocabulary.
__attribute__((optimize("no-associative-math")))
EXPORT int embed_tokens(const struct embedding *by, const int64_t *tokens,
                        const int64_t *hypotheses, int64_t rows, const float *position,
                        float *states)
{
    const int64_t width = by->width;
    for (int64_t row = 0; row < rows; row++) {
        const int64_t token = tokens[hypotheses ? hypotheses[row] : row];
        float *output = states + row * width;
        if (token < 0 || token >= by->entries)
            return 0;
        if (by->scales) {
            const int8_t *entry = (const int8_t *)by->table + token * width;
            for (int64_t i = 0; i < width; i++)
                output[i] = entry[i] * by->scales[token] * by->factor + position[i];
        } else {
            const float *entry = (const float *)by->table + token * width;
            for (int64_t i = 0; i < width; i++)
                output[i] = entry[i] * by->factor + position[i];
        }
    }
    return 1;
}

// Let each hypothesis see what its parent (B, K) saw, and itself at position `used` + k.
//
// before, after: masks (B, K, N), 0 at the positions that a hypothesis sees.
EXPORT void descend(const float *before, const int64_t *parents, int64_t sentences, int64_t beams,
                    int64_t positions, int64_t used, float *after)
{
    for (int64_t hypothesis = 0; hypothesis < sentences * beams; hypothesis++) {
        const int64_t k = hypothesis % beams, parent = hypothesis - k + parents[hypothesis];
        float *own = after + hypothesis * positions;
        memcpy(own, before + parent * positions, (size_t)positions * sizeof(float));
        own[used + k] = 0;
    }
}

// List the positions at which a mask (lists, N) is 0: the first `counts` of places (lists, N).
// Rows of the mask are `stride` floats apart.
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
