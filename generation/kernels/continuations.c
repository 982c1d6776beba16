// The best next tokens of hypotheses, with one pass over their logits.
//
// Shapes: R rows of logits, B sentences, K hypotheses of each, V entries of the vocabulary, C
// candidates of a sentence.

#include "instructions.h"
#include "search.h"

INLINE float sum_of_exponentials(const float *values, int64_t count, float highest)
{
    float total = 0;
    for (int64_t i = 0; i < count; i++)
        total += exponential(values[i] - highest);
    return total;
}

// Compute the log-sum-exp of a row of logits (V,), and the maximum of each block: (V / block,).
//
// The log-sum-exp of a row with NaN is NaN.
static float log_sum_and_maxima(const float *values, int64_t vocabulary, int64_t block, float *maxima)
{
    const int64_t blocks = vocabulary / block;
    float so_far = LOWEST; // the highest logit of the blocks so far
    double total = 0;      // sum of e^(logit - so_far)
    for (int64_t i = 0; i <= blocks; i++) {
        const int64_t width = i < blocks ? block : vocabulary - blocks * block;
        const float highest = maximum(values + i * block, width);
        if (i < blocks)
            maxima[i] = highest;
        const float sum = sum_of_exponentials(values + i * block, width, highest);
        if (highest <= LOWEST && sum == sum)
            continue; // nothing, or -inf alone; `maximum` overlooks NaN
        if (highest > so_far) {
            total *= __builtin_exp((double)so_far - highest);
            so_far = highest;
        }
        total += __builtin_exp((double)highest - so_far) * sum;
    }
    return (float)(so_far + __builtin_log(total));
}

// Replace the logits of banned tokens by `nothing`, and find the maxima of their blocks again.
static void ban(const int64_t *banned, int64_t banned_count, float nothing, float *values,
                int64_t block, int64_t blocks, float *maxima)
{
    for (int64_t i = 0; i < banned_count; i++)
        values[banned[i]] = nothing;
    for (int64_t i = 0; i < banned_count; i++) {
        const int64_t own = banned[i] / block;
        if (own < blocks && (i == 0 || own != banned[i - 1] / block))
            maxima[own] = maximum(values + own * block, block);
    }
}

INLINE int has_nan(const float *values, int64_t count)
{
    int found = 0;
    for (int64_t i = 0; i < count; i++)
        found |= values[i] != values[i];
    return found;
}

// Find the first of the best tokens of each row of logits (R, V): (R,). NaN is best, as in torch.
EXPORT void best_tokens(const float *logits, int64_t rows, int64_t vocabulary, int64_t *tokens,
                        int threads)
{
#pragma omp parallel for schedule(static) num_threads(threads) if (rows > 1)
    for (int64_t row = 0; row < rows; row++) {
        const float *values = logits + row * vocabulary;
        const int nan = has_nan(values, vocabulary);
        const float highest = maximum(values, vocabulary);
        tokens[row] = 0; // if all logits are -inf
        for (int64_t token = 0; token < vocabulary; token++)
            if (nan ? values[token] != values[token] : values[token] == highest) {
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
// logits: (R, V). Those of banned tokens are replaced by `nothing`, the least of all scores. The other
// tokens keep their probabilities. running: (B * K) log-probabilities of the hypotheses. open_rows: (R,)
// the hypotheses that have logits; NULL means all. A list that cannot be filled ends with `nothing`. If
// a log-sum-exp is NaN or infinite, the best of its sentence is NaN, as in torch. The C best lie in the
// C blocks with the best maxima, or after the last whole block.
//
// places, log_sums, maxima: room for (B * K), (R,) and (R, V / block) numbers.
EXPORT void best_candidates(float *logits, int64_t rows, int64_t vocabulary, int64_t block,
                            const int64_t *banned, int64_t banned_count, const float *running,
                            const int64_t *open_rows, int64_t sentences, int64_t beams,
                            int64_t count, float nothing, int64_t *places, float *log_sums,
                            float *maxima, float *scores, int64_t *hypotheses, int64_t *tokens,
                            int threads)
{
    const int64_t blocks = vocabulary / block;
    for (int64_t hypothesis = 0; hypothesis < sentences * beams; hypothesis++)
        places[hypothesis] = open_rows ? -1 : hypothesis; // the row of its logits
    for (int64_t row = 0; row < rows && open_rows; row++)
        places[open_rows[row]] = row;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t row = 0; row < rows; row++) {
        float *values = logits + row * vocabulary, *own = maxima + row * blocks;
        log_sums[row] = log_sum_and_maxima(values, vocabulary, block, own);
        ban(banned, banned_count, nothing, values, block, blocks, own);
    }
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
        int undefined = 0;
        for (int64_t k = 0; k < beams; k++) {
            const int64_t hypothesis = sentence * beams + k;
            const int64_t row = places[hypothesis];
            if (row < 0)
                continue;
            undefined |= !__builtin_isfinite(log_sums[row]);
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
            const int64_t row = places[hypothesis];
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
        if (undefined)
            own[0] = __builtin_nanf("");
    }
}
