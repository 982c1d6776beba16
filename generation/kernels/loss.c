// The label-smoothed loss and its gradient, for training (section 5.4).
//
// Shapes: C tokens of a chunk, V entries of the vocabulary.

#include "instructions.h"

#include <math.h>
#include <omp.h>

enum { BLOCK = 1024 }; // values that are added in float

// Replace a row of logits (V,) by the gradient of its loss, and return the loss:
// (1 - epsilon) * nll(target) + epsilon * mean over the vocabulary of nll.
static double smooth_row(float *values, int64_t count, int64_t target, float epsilon)
{
    const float highest = maximum(values, count), at_target = values[target] - highest;
    if (highest <= LOWEST) { // no logit is finite; `maximum` overlooks NaN
        for (int64_t i = 0; i < count; i++)
            values[i] = NAN;
        return NAN;
    }
    double total = 0, exp_sum = 0; // sums of logits minus the highest, and of their exponentials
    for (int64_t first = 0; first < count; first += BLOCK) {
        const int64_t end = count - first < BLOCK ? count : first + BLOCK;
        float total_of_block = 0, sum_of_block = 0;
        for (int64_t i = first; i < end; i++) {
            const float logit = values[i] - highest;
            total_of_block += logit;
            // Without the limit, products with tiny probabilities would be denormal, which is slow.
            values[i] = logit < NEGLIGIBLE ? 0 : exponential(logit);
            sum_of_block += values[i];
        }
        total += total_of_block;
        exp_sum += sum_of_block;
    }
    const float scale = (float)(1 / exp_sum), of_each = epsilon / (float)count;
    for (int64_t i = 0; i < count; i++)
        values[i] = values[i] * scale - of_each;
    values[target] -= 1 - epsilon;
    // Without smoothing, a logit may be minus infinity.
    const double of_all = epsilon == 0 ? 0 : epsilon * total / (double)count;
    return __builtin_log(exp_sum) - (1 - epsilon) * at_target - of_all;
}

// Replace logits (C, V) by the gradient of the loss, and compute the loss of each token (C,).
//
// room: (threads, V) if the logits are bfloat16, or NULL if they are floats. The result is 0, and
// nothing has changed, if a target is outside the vocabulary.
EXPORT int smooth_loss(void *logits, int64_t tokens, int64_t vocabulary, const int64_t *targets,
                       float epsilon, float *room, double *losses, int threads)
{
    for (int64_t token = 0; token < tokens; token++)
        if (targets[token] < 0 || targets[token] >= vocabulary)
            return 0;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t token = 0; token < tokens; token++) {
        uint16_t *halves = (uint16_t *)logits + token * vocabulary;
        float *values = (float *)logits + token * vocabulary;
        if (room) {
            values = room + omp_get_thread_num() * vocabulary;
            widen_row(halves, vocabulary, values);
        }
        losses[token] = smooth_row(values, vocabulary, targets[token], epsilon);
        if (room)
            halve_row(values, vocabulary, halves);
    }
    return 1;
}
