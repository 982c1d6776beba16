// Products of states by the weights of linear layers, with bias and ReLU.
//
// A result for a row depends on that row alone: neither on other rows nor on the number of threads.

#pragma once
#include <stdint.h>

// A linear layer, or several that read the same states. Panels of weights are filled up with zeros.
struct product {
    int64_t in, out;
    const void *panels;  // (out / PANEL, in / k, PANEL, k): k is 4 in int8, 2 in bfloat16, 1 in float;
                         // or digits, as `pack_digits` writes them
    const int32_t *sums; // of each output's int8 weights, or NULL
    const float *scale;  // of each output of the panels, for int8 and digits, or NULL; for int8, divided
                         // by `largest`
    const float *bias;   // (out,) or NULL
    int32_t largest;     // states are rounded to integers from -largest to largest
    int32_t relu, halves; // halves: the weights are bfloat16, and states are rounded to it
    int32_t digits;       // the weights are digits of floats
};

// Memory for rounded rows of states, and for the scale of each row (R,).
struct rounded {
    void *states; // bytes, or bfloat16 as uint16_t, (R, in); or digits of R rows, up to whole tiles
    float *scales;
};

// Multiply rows of states (R, in): output (R, out). All threads of a parallel region call this.
void multiply(const struct product *by, const float *states, int64_t rows,
              const struct rounded *memory, float *output);

// Do the same for weights that are digits of floats.
void multiply_digits(const struct product *by, const float *states, int64_t rows,
                     const struct rounded *memory, float *output);

// Multiply rows of states (R, in) in that many threads.
void multiply_states(const struct product *by, const float *states, int64_t rows,
                     const struct rounded *memory, float *output, int threads);
