// LayerNorm(x + Dropout(Sublayer(x))) and its gradient, for training (sections 3.1 and 5.4).
//
// Shapes: R rows of states, D = d_model.

#include "random.h"

#include <omp.h>

struct residual_norm {
    int64_t rows, width; // R, D
    const float *weight, *bias;
    float epsilon;
    int32_t is_half;       // the sublayer's output and its gradient are bfloat16, or else floats
    struct dropout dropout;
};

// Compute the normalised sums (R, D) of states (R, D) and a sublayer's output (R, D).
//
// sums: (R, D) before the norm. moments: (R, 2) mean and 1 / deviation of each row of them.
EXPORT void add_and_normalize(const struct residual_norm *norm, const float *states, const void *output,
                              float *sums, float *moments, float *normalized, int threads)
{
    const int64_t width = norm->width;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t row = 0; row < norm->rows; row++) {
        const float *state = states + row * width;
        float *sum = sums + row * width, *result = normalized + row * width;
        if (norm->is_half)
            widen_row((const uint16_t *)output + row * width, width, sum);
        else
            memcpy(sum, (const float *)output + row * width, (size_t)width * sizeof(float));
        drop_out(&norm->dropout, row, sum, width);
        float total = 0, squares = 0;
        for (int64_t i = 0; i < width; i++)
            total += sum[i] += state[i];
        const float mean = total / (float)width;
        for (int64_t i = 0; i < width; i++)
            squares += (sum[i] - mean) * (sum[i] - mean);
        const float scale = 1 / __builtin_sqrtf(squares / (float)width + norm->epsilon);
        for (int64_t i = 0; i < width; i++)
            result[i] = (sum[i] - mean) * scale * norm->weight[i] + norm->bias[i];
        moments[2 * row] = mean;
        moments[2 * row + 1] = scale;
    }
}

// Compute the gradients of states and output (R, D), and add the gradients of the norm's weight and
// bias to of_norm (threads, 2, D).
EXPORT void add_and_normalize_backward(const struct residual_norm *norm, const float *gradient,
                                       const float *sums, const float *moments, float *of_states,
                                       void *of_output, float *of_norm, int threads)
{
    const int64_t width = norm->width;
#pragma omp parallel num_threads(threads)
    {
        float *of_weight = of_norm + 2 * width * omp_get_thread_num(), *of_bias = of_weight + width;
        float dropped[width];
#pragma omp for schedule(static)
        for (int64_t row = 0; row < norm->rows; row++) {
            const float *above = gradient + row * width, *sum = sums + row * width;
            const float mean = moments[2 * row], scale = moments[2 * row + 1];
            float *result = of_states + row * width;
            float total = 0, product = 0;
            for (int64_t i = 0; i < width; i++) {
                const float normal = (sum[i] - mean) * scale, slope = above[i] * norm->weight[i];
                total += slope;
                product += slope * normal;
                of_weight[i] += above[i] * normal;
                of_bias[i] += above[i];
            }
            total /= (float)width;
            product /= (float)width;
            for (int64_t i = 0; i < width; i++) {
                const float normal = (sum[i] - mean) * scale, slope = above[i] * norm->weight[i];
                dropped[i] = result[i] = (slope - total - normal * product) * scale;
            }
            drop_out(&norm->dropout, row, dropped, width);
            if (norm->is_half)
                halve_row(dropped, width, (uint16_t *)of_output + row * width);
            else
                memcpy((float *)of_output + row * width, dropped, (size_t)width * sizeof(float));
        }
    }
}
