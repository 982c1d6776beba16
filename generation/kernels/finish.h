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
    struct finish finish;
    finish.lower_bound = by->relu ? 0 : -__builtin_inff();
    finish.integers = by->sums != NULL;
    finish.out = by->out;
    finish.width = by->out - start < PANEL ? by->out - start : PANEL;
    memset(finish.bias, 0, sizeof(finish.bias));
    if (by->bias)
        memcpy(finish.bias, by->bias + start, (size_t)finish.width * sizeof(float));
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
//
// Vectors are written out, because GCC computes some of these loops one output after the other.
INLINE void finish_rows(const struct finish *by, const int rows, const union sums *sums,
                        const float *scales, float *output)
{
    typedef int32_t int32_lanes __attribute__((vector_size(sizeof(vector))));
    const floats lower_bound = float_in_all_lanes(by->lower_bound);
    for (int row = 0; row < rows; row++) {
        float filled_up[PANEL]; // the last panel may have fewer outputs
        float *place = by->width == PANEL ? output + row * by->out : filled_up;
        for (int i = 0; i < PANEL; i += LANES) {
            floats values = read_floats(sums->floats + row * PANEL + i);
            const floats bias = read_floats(by->bias + i);
            if (by->integers) {
                int32_lanes zeros;
                memcpy(&zeros, by->zeros + i, sizeof(zeros));
                values = __builtin_convertvector((int32_lanes)values - zeros, floats);
            }
            // The explicit operation keeps the order in which torch rounds.
            if (scales)
                values = multiply_add(values * read_floats(by->scale + i),
                                      float_in_all_lanes(scales[row]), bias);
            else
                values += bias;
            values = larger(lower_bound, values); // NaN stays NaN
            memcpy(place + i, &values, sizeof(values));
        }
        if (place == filled_up)
            memcpy(output + row * by->out, filled_up, (size_t)by->width * sizeof(float));
    }
}
