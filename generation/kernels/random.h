// Dropout (section 5.4) whose random bits depend on a seed, a row and a column.
//
// The backward pass computes the bits of the forward pass again, so no mask is kept.

#pragma once
#include "instructions.h"

struct dropout {
    uint64_t seed;
    uint32_t kept; // the chance to keep a value, times 2^32; 0 keeps all values
};

// Set values of a row (width,) to 0 or divide them by the chance to keep them.
INLINE void drop_out(const struct dropout *dropout, int64_t row, float *values, int64_t width)
{
    const uint32_t kept = dropout->kept;
    if (!kept)
        return;
    uint64_t mixed = dropout->seed ^ (uint64_t)(row + 1) * 0x9e3779b97f4a7c15u;
    mixed = (mixed ^ mixed >> 30) * 0xbf58476d1ce4e5b9u;
    mixed = (mixed ^ mixed >> 27) * 0x94d049bb133111ebu;
    const uint32_t of_row = (uint32_t)(mixed >> 32);
    const float scale = 4294967296.f / (float)kept;
    for (int64_t i = 0; i < width; i++) {
        uint32_t bits = of_row + (uint32_t)i * 0x9e3779b9u;
        bits = (bits ^ bits >> 16) * 0x85ebca6bu;
        bits = (bits ^ bits >> 13) * 0xc2b2ae35u;
        bits ^= bits >> 16;
        values[i] = bits < kept ? values[i] * scale : 0;
    }
}
