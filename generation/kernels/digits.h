// Digits of floats, which the tiles of AMX multiply (Ootomo, Ozaki and Yokota, 2024,
// https://arxiv.org/abs/2306.11975).
//
// A row of floats becomes integers of 24 bits, relative to its largest value. An integer has three
// digits of 8 bits. Sums of products of digits are exact. Of the nine products of two integers' digits,
// that of the two lowest is left out, because it is smaller than a rounding error.

#pragma once
#include "tiles.h"

#if defined(HAS_TILES)
// Tiles of 64 inputs have the highest digits, the middle ones and the lowest ones.
enum { DIGITS = 3, TILE = TILE_ROWS * TILE_BYTES, STEP = DIGITS * TILE };
#define LARGEST (127 * 65536. + 127 * 256 + 127)  // the integer with the largest digits
#define SHARE (1 / 1073741824.f)                  // by which joined sums are multiplied: 2^-30
#define SCALE (65536 / LARGEST / LARGEST / SHARE) // of them, if the largest values are 1
#endif
