// Digits of floats, which the tiles of AMX multiply (Ootomo, Ozaki and Yokota, 2024,
// https://arxiv.org/abs/2306.11975).
//
// A row of floats becomes integers of 24 bits, relative to its largest value. An integer has three
// digits of 8 bits. Sums of products of digits are exact. Two integers have nine products of digits.
// The product of the two lowest digits is left out, because it is smaller than a rounding error.

#pragma once
#include "tiles.h"

#if defined(HAS_TILES)
// Tiles of 64 inputs have the highest digits, the middle ones and the lowest ones.
enum { DIGITS = 3, TILE = TILE_ROWS * TILE_BYTES, STEP = DIGITS * TILE };
#define LARGEST (127 * 65536. + 127 * 256 + 127)  // the integer with the largest digits
#define SHARE (1 / 1073741824.f)                  // factor of joined sums: 2^-30
#define SCALE (65536 / LARGEST / LARGEST / SHARE) // scale of joined sums, if the largest values are 1

// Sums of products of digits, for 16 rows and outputs, with the factors 2^32, 2^24, 2^16 and 2^8.
enum { SUMS = 4 };
typedef int32_t sums_of_digits[SUMS][TILE_ROWS * TILE_ROWS];

INLINE void begin_sums(void)
{
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

// Fetch an eighth of the weights that are multiplied some steps later. If a step fetched all at once,
// its own weights would have to wait.
INLINE void fetch_part(const int8_t *weights, int eighth, int fetches)
{
    enum { AHEAD = 3 * STEP, PART = STEP / 8 };
    for (int i = 0; fetches && i < PART; i += TILE_BYTES)
        __builtin_prefetch(weights + AHEAD + eighth * PART + i);
}

// Add the products of a step of states and weights to the sums in tiles 0 to 3.
INLINE void add_step(const int8_t *states, const int8_t *weights, int fetches)
{
    _tile_loadd(7, weights, TILE_BYTES);
    _tile_loadd(4, states, TILE_BYTES);
    fetch_part(weights, 0, fetches);
    _tile_dpbssd(0, 4, 7);
    _tile_loadd(5, (states + TILE), TILE_BYTES);
    fetch_part(weights, 1, fetches);
    _tile_dpbssd(1, 5, 7);
    _tile_loadd(6, (states + 2 * TILE), TILE_BYTES);
    fetch_part(weights, 2, fetches);
    _tile_dpbssd(2, 6, 7);
    _tile_loadd(7, (weights + TILE), TILE_BYTES);
    fetch_part(weights, 3, fetches);
    _tile_dpbssd(1, 4, 7);
    fetch_part(weights, 4, fetches);
    _tile_dpbssd(2, 5, 7);
    fetch_part(weights, 5, fetches);
    _tile_dpbssd(3, 6, 7);
    _tile_loadd(7, (weights + 2 * TILE), TILE_BYTES);
    fetch_part(weights, 6, fetches);
    _tile_dpbssd(2, 4, 7);
    fetch_part(weights, 7, fetches);
    _tile_dpbssd(3, 5, 7);
}

INLINE void store_sums(sums_of_digits sums)
{
    _tile_stored(0, sums[0], TILE_BYTES);
    _tile_stored(1, sums[1], TILE_BYTES);
    _tile_stored(2, sums[2], TILE_BYTES);
    _tile_stored(3, sums[3], TILE_BYTES);
}

INLINE int64_t smaller(int64_t left, int64_t right) { return left < right ? left : right; }
#endif
