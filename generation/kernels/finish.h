// Bias, scale and ReLU, which turn the sums of a product into outputs.

#pragma once
#include "instructions.h"
#include "products.h"

// How the sums of a panel become outputs.
struct finish {
    int32_t zeros[PANEL]; // the zero point of the states times each output's sum of weights
    float scale[PANEL], bias[PANEL];
    float lower_bound;  // of the outputs: 0 for ReLU
    int integers;       // the sums are integers
    int64_t out, width; // outputs of the layer, and of this panel without its padding
};

INLINE struct finish prepare_finish(const struct product *by, int64_t start)
{
    struct finish finish = {.lower_bound = by->relu ? 0 : -__builtin_inff(), .out = by->out};
    finish.width = by->out - start < PANEL ? by->out - start : PANEL;
    if (by->bias)
        memcpy(finish.bias, by->bias + start, (size_t)finish.width * sizeof(float));
    finish.integers = by->sums != NULL;
    for (int i = 0; i < PANEL && by->sums; i++)
        finish.zeros[i] = (by->largest + 1) * by->sums[start + i];
    if (by->scale)
        memcpy(finish.scale, by->scale + start, sizeof(finish.scale));
    return finish;
}

// Sums (rows, PANEL) of products: integers for int8, and otherwise floats.
enum { TILE_ROWS = 16 };
union sums {
    int32_t integers[TILE_ROWS * PANEL];
    float floats[TILE_ROWS * PANEL];
} __attribute__((aligned(64)));

// Finish sums, and write the outputs. Without `scales` of the rows, sums are not scaled.
INLINE void finish_rows(const struct finish *by, const int rows, const union sums *sums,
                        const float *scales, float *output)
{
    for (int row = 0; row < rows; row++) {
        float filled_up[PANEL]; // the last panel may have fewer outputs
        float *place = by->width == PANEL ? output + row * by->out : filled_up;
        for (int i = 0; i < PANEL; i++) {
            const int at = row * PANEL + i;
            const float sum = by->integers ? (float)(sums->integers[at] - by->zeros[i])
                                           : sums->floats[at];
            // The explicit operation keeps the order in which torch rounds.
            const float product =
                scales ? __builtin_fmaf(sum * by->scale[i], scales[row], by->bias[i])
                       : sum + by->bias[i];
            place[i] = product < by->lower_bound ? by->lower_bound : product;
        }
        if (place == filled_up)
            memcpy(output + row * by->out, filled_up, (size_t)by->width * sizeof(float));
    }
}
